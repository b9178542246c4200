"""`buddy eval ppl`: perplexity at several budgets."""

from pathlib import Path
from typing import Annotated, Any

import typer

from buddy.cli import options
from buddy.cli.loading import check_room
from buddy.lab.cli import eval_run

_TEXTS: Any = ["wikitext2"]


@options.on_device
@options.grouped
def ppl(
    *,
    compared: eval_run.EvalOptions,
    text: Annotated[
        list[str],
        typer.Option(help="wikitext2, ptb or a text file; repeat for several."),
    ] = _TEXTS,
    data_dir: options.DataDir = None,
    window: Annotated[int, options.count(2, "--tokens", "--window", help="Tokens of a window.")] = (
        1024
    ),
    stride: Annotated[int, options.count(1, help="Tokens scored in each window.")] = 512,
    limit: Annotated[int | None, options.count(1, help="Most windows. All if not given.")] = None,
    route_on: eval_run.RouteOn = "prompt",
    batch: Annotated[int, options.count(1, help="Windows at a time.")] = 4,
) -> None:
    """Perplexity over sliding windows.

    Each window begins as the model's tokenizer begins a text, and is routed from the tokens before
    those it scores. Interrupted, the same command goes on where it stopped.

    Example: `buddy eval ppl -b 1.0 -b 0.75 --out ppl.json`
    """
    from buddy.data.tokens import begin_of_text
    from buddy.importance.calibration import read_text
    from buddy.lab.evaluation.perplexity import (
        WindowedText,
        check_windows,
        run_perplexity,
        sliding_windows,
    )

    check_windows(window, stride)
    texts = {name: read_text(name, data_dir) for name in text}
    config = {
        "text": list(texts),
        "window": window,
        "stride": stride,
        "limit": limit,
        "route_on": route_on,
        "batch": batch,
        "seed": None,
    }
    shown = _names(list(texts))
    with eval_run.eval_run(
        compared, config, check=lambda outline: check_room(outline, window)
    ) as run:
        windows = {}
        for name, content in texts.items():
            ids = run.tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
            begin = begin_of_text(run.tokenizer)
            windows[name] = sliding_windows(
                ids, window=window, stride=stride, limit=limit, begin=begin
            )
        run.total(len(run.conditions) * sum(map(len, windows.values())))
        results: dict[str, list[Any]] = {"points": [], "execution": []}
        for name, ids in windows.items():
            measured = run_perplexity(
                run.model,
                run.conditions,
                WindowedText(name=shown[name], ids=ids, stride=stride, leaks=route_on == "full"),
                batch=batch,
                log=run.log,
                on_windows=run.count,
            )
            for part, entries in measured.items():
                results[part] += entries
    columns = [(shown[name], "perplexity") for name in windows]
    eval_run.show_points(run.console, results["points"], columns)
    eval_run.save_record(run, "eval-ppl", results)


def _names(texts: list[str]) -> dict[str, str]:
    """What each text is called: a file without its folders, where no other is called so."""
    short = [Path(text).name for text in texts]
    pairs = zip(texts, short, strict=True)
    return {text: name if short.count(name) == 1 else text for text, name in pairs}
