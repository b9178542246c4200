"""`buddy importance`: how much each block of a model matters, and the order to remove them in."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def importance(
    model: Annotated[str, typer.Argument(help="Preset, hub id, folder or GGUF file.")],
    out: Annotated[Path, typer.Option(help="Where the RunRecord goes (JSON).")],
    indicator: Annotated[
        str,
        typer.Option(
            help="delta-ppl, taylor, fisher, grad-norm, cosine, block-influence; or sleb, a search."
        ),
    ] = "block-influence",
    text: Annotated[str, typer.Option(help="wikitext2, ptb or a text file.")] = "wikitext2",
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the named corpora.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text.")] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Windows at a time.")] = 4,
    protect: Annotated[
        str,
        typer.Option(help="Blocks that go last: ends (first, last), plus (0-3, last two) or none."),
    ] = "ends",
) -> None:
    """Measure each block's importance; write scores, prior and removal order.

    Interrupted, the same command goes on where it stopped. Use the result with
    `--policy static:FILE.json`.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    from buddy.cli.display import fetch_progress, stderr
    from buddy.engine.causal_lm import BuddyForCausalLM
    from buddy.errors import PolicyError, ResultError
    from buddy.importance.calibration import cut_windows, read_text
    from buddy.importance.indicator import INDICATORS
    from buddy.models.loading import load_tokenizer
    from buddy.results import RunRecord

    if indicator not in (*INDICATORS, "sleb"):
        raise PolicyError(
            f"no indicator {indicator!r}: expected one of {', '.join(INDICATORS)}, sleb"
        )
    if not out.parent.is_dir():
        raise ResultError(f"--out {out}: there is no folder {out.parent}; make it first")
    calibration = read_text(text, data_dir)
    console = stderr()
    with fetch_progress(console) as on_progress:
        loaded = BuddyForCausalLM.from_pretrained(model, policy="full", on_progress=on_progress)
    ids = cut_windows(load_tokenizer(model), calibration, tokens=tokens, limit=windows)
    num_blocks = loaded.num_blocks
    protected = _protected(protect, num_blocks)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeLeft(compact=True),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        if indicator == "sleb":
            results = _search(loaded.backbone, ids, batch, bar)
        else:
            identity = {"model": model, "indicator": indicator, "dtype": str(loaded.dtype)}
            results = _score(indicator, loaded.backbone, ids, batch, out, identity, protected, bar)
    RunRecord(
        kind=f"importance-{indicator}",
        command=shlex.join(["buddy", *sys.argv[1:]]),
        config={
            "model": model,
            "indicator": indicator,
            "text": text,
            "windows": len(ids),
            "tokens": tokens,
            "batch": batch,
            "dtype": str(loaded.dtype),
            "protect": protect,
        },
        results=results,
    ).save(out)
    order = " ".join(str(block) for block in results["removal_order"])
    console.print(f"least important first: {order}", style="dim")
    sys.stdout.write(f"{out}\n")


def _protected(rule: str, num_blocks: int) -> tuple[int, ...]:
    from buddy.errors import PolicyError
    from buddy.importance.orders import shortened_llama_protected

    rules = {
        "ends": (0, num_blocks - 1),
        "plus": shortened_llama_protected(num_blocks),
        "none": (),
    }
    if rule not in rules:
        raise PolicyError(f"--protect must be one of {', '.join(rules)}, got {rule!r}")
    return rules[rule]


def _score(
    name: str,
    backbone: Any,
    ids: Any,
    batch: int,
    out: Path,
    identity: dict[str, Any],
    protected: tuple[int, ...],
    bar: Any,
) -> dict[str, Any]:
    from buddy.importance.indicator import build_indicator
    from buddy.importance.measure import measure
    from buddy.importance.orders import ascending_order

    task = bar.add_task(name)
    scores = measure(
        build_indicator(name, backbone),
        ids,
        batch=batch,
        resume=out.with_name(f".{out.name}.partial"),
        identity=identity,
        on_batch=lambda done, total: bar.update(task, completed=done, total=total),
    ).tolist()
    # Protected blocks are left out of the order: they are never to go.
    order = ascending_order(scores, protected)[: len(scores) - len(protected)]
    return {"importance": scores, "removal_order": order}


def _search(backbone: Any, ids: Any, batch: int, bar: Any) -> dict[str, Any]:
    from buddy.importance.sleb import sleb_search

    rounds = backbone.num_blocks - 2
    task = bar.add_task("sleb", total=rounds)
    found = sleb_search(
        backbone,
        ids.split(batch),
        rounds,
        on_round=lambda number, block, nll: bar.update(task, completed=number),
    )
    return {"removal_order": list(found.order), "nll": list(found.nll)}
