"""`buddy eval ppl`: perplexity at several budgets."""

from pathlib import Path
from typing import Annotated

import typer

from buddy.cli import options
from buddy.cli.loading import check_room
from buddy.hub.presets import DEFAULT_MODEL
from buddy.lab.cli import eval_run


def ppl(
    out: eval_run.Out,
    model: options.Model = DEFAULT_MODEL,
    text: Annotated[
        list[str] | None,
        typer.Option(help="wikitext2, ptb or a text file; repeat for several. wikitext2 if none."),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the named corpora.")] = None,
    budget: eval_run.Budgets = None,
    policy: eval_run.Policies = None,
    window: Annotated[int, options.count(2, help="Tokens of a window.")] = 1024,
    stride: Annotated[int, options.count(1, help="Tokens scored in each window.")] = 512,
    limit: Annotated[int | None, options.count(1, help="At most this many windows.")] = None,
    route_on: eval_run.RouteOn = "prompt",
    batch: Annotated[int, options.count(1, help="Windows at a time.")] = 4,
    dtype: options.Dtype = None,
) -> None:
    """Perplexity over sliding windows.

    Each window is routed from the tokens before those it scores. Interrupted, the same command
    goes on where it stopped.
    """
    from buddy.importance.calibration import read_text
    from buddy.lab.evaluation.perplexity import (
        WindowedText,
        check_windows,
        run_perplexity,
        sliding_windows,
    )

    check_windows(window, stride)
    texts = {name: read_text(name, data_dir) for name in text or ["wikitext2"]}
    config = {
        "text": list(texts),
        "window": window,
        "stride": stride,
        "limit": limit,
        "route_on": route_on,
        "batch": batch,
        "seed": None,
    }
    with eval_run.eval_run(
        model,
        out,
        policies=policy,
        budgets=budget,
        config=config,
        dtype=dtype,
        check=lambda outline: check_room(outline, window),
    ) as run:
        windows, shown = {}, _names(list(texts))
        for name, content in texts.items():
            ids = run.tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
            windows[name] = sliding_windows(ids, window=window, stride=stride, limit=limit)
        run.total(len(run.conditions) * sum(map(len, windows.values())))

        def on_windows(condition: object, count: int) -> None:
            run.show(condition)  # type: ignore[arg-type]
            run.advance(count)

        results: dict[str, list[object]] = {"points": [], "execution": []}
        for name, ids in windows.items():
            found = run_perplexity(
                run.model,
                run.conditions,
                WindowedText(name=shown[name], ids=ids, stride=stride, leaks=route_on == "full"),
                batch=batch,
                log=run.log,
                on_windows=on_windows,
            )
            for part, entries in found.items():
                results[part] += entries
    columns = [(shown[name], "perplexity") for name in windows]
    eval_run.show_points(run.console, results["points"], columns)  # type: ignore[arg-type]
    eval_run.save_record(run, "eval-ppl", out, results)


def _names(texts: list[str]) -> dict[str, str]:
    """What each text is called: a file without its folders, where no other is called so."""
    short = [Path(text).name for text in texts]
    pairs = zip(texts, short, strict=True)
    return {text: name if short.count(name) == 1 else text for text, name in pairs}
