"""`buddy importance`: how much each block of a model matters, and the order to remove them in."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.named import offer
from buddy.hub.presets import ROUTED_MODEL
from buddy.processes import launched

if TYPE_CHECKING:
    from rich.console import Console

    from buddy.cli.views.bars import Bars
    from buddy.model import BuddyForCausalLM


_INDICATORS: Final = ("delta-ppl", "taylor", "fisher", "grad-norm", "cosine", "block-influence")


@options.on_device
@options.grouped
def importance(
    out: options.RecordOut,
    model: options.Model = ROUTED_MODEL,
    indicator: Annotated[
        str,
        typer.Option(
            help="delta-ppl, taylor, fisher, grad-norm, cosine, block-influence; or sleb, a "
            "search.",
            autocompletion=offer(*_INDICATORS, "sleb"),
        ),
    ] = "block-influence",
    *,
    calibration: options.CalibrationOptions,
    protect: Annotated[
        str,
        typer.Option(help="Blocks that go last: ends (first, last), plus (0-3, last two) or none."),
    ] = "ends",
    rounds: Annotated[
        int | None,
        options.count(1, help="Blocks that sleb removes; all but the ends if not given."),
    ] = None,
) -> None:
    """Measure each block's importance, and the removal order.

    Interrupted, the same command goes on where it stopped. Use the result with
    `--policy static:FILE.json`.

    Example: `buddy importance qwen3-0.6b --out order.json`
    """
    from buddy.checkpoint.resolve import resolve
    from buddy.cli.loading import load_to_measure
    from buddy.cli.views.display import stderr
    from buddy.importance.calibration import cut_windows, read_text
    from buddy.importance.search.sleb import check_rounds

    _check_indicator(indicator, protect, rounds)
    text = read_text(calibration.text, calibration.data_dir)
    console = stderr()

    def check(outline: "BuddyForCausalLM") -> None:
        _protected(protect, outline.num_blocks)
        check_rounds(rounds or 0, outline.num_blocks)

    resolved = resolve(model)
    loaded = load_to_measure(
        resolved, calibration.tokens, console, dtype=calibration.dtype, check=check
    )
    ids = cut_windows(
        resolved.load_tokenizer(),
        text,
        tokens=calibration.tokens,
        limit=calibration.windows,
        note=lambda text: console.print(text, style="dim"),
    )
    partial = out.with_name(f".{out.name}.partial")
    how = {"batch": calibration.batch, "resume": partial, "ranks": launched()}
    with measuring(console, out) as bars:
        if indicator == "sleb":
            results = _search(loaded, ids, rounds, how, bars)
        else:
            results = _score(indicator, loaded, ids, protect, how, bars)
    settings = {
        "model": model,
        "indicator": indicator,
        "text": calibration.text,
        "windows": len(ids),
        "tokens": calibration.tokens,
        "batch": calibration.batch,
        "dtype": str(loaded.dtype),
        "protect": protect,
        "rounds": rounds,
    }
    save_record(out, partial, f"importance-{indicator}", loaded, settings, results)
    order = " ".join(str(block) for block in results["removal_order"])
    console.print(f"least important first: {order}", style="dim")
    sys.stdout.write(f"{out}\n")


def save_record(
    out: Path,
    partial: Path,
    kind: str,
    model: "BuddyForCausalLM",
    config: dict[str, Any],
    results: dict[str, Any],
) -> None:
    """Write the record of a measurement; only then what was kept for resuming goes."""
    from buddy.records import RunRecord

    if not launched().is_writer:
        return
    RunRecord(kind=kind, model=model.facts(), config=config, results=results).save(out)
    partial.unlink(missing_ok=True)


@contextmanager
def measuring(console: "Console", out: Path) -> "Iterator[Bars]":
    """Progress bars; Ctrl-C within ends the command and says how to go on.

    Raises:
        ResultError: Another run measures for the same record.
    """
    from buddy.cli.views.bars import stoppable_bars
    from buddy.files import alone

    with (
        alone(out) if launched().is_writer else nullcontext(),
        stoppable_bars(console, "stopped; the same command goes on from here") as bars,
    ):
        yield bars


def _check_indicator(indicator: str, protect: str, rounds: int | None) -> None:
    from buddy.errors import PolicyError
    from buddy.importance.indicators.indicator import INDICATORS

    if indicator not in (*INDICATORS, "sleb"):
        raise PolicyError(
            f"no indicator {indicator!r}: expected one of {', '.join(INDICATORS)}, sleb"
        )
    if indicator != "sleb" and rounds is not None:
        raise PolicyError(
            f"--rounds is for sleb; {indicator} ranks all blocks at once: leave it out"
        )
    if indicator == "sleb" and protect != "ends":
        raise PolicyError(f"sleb always keeps the ends: leave out --protect {protect}")


def _protected(rule: str, num_blocks: int) -> tuple[int, ...]:
    from buddy.errors import PolicyError
    from buddy.importance.search.orders import shortened_llama_protected

    rules = {
        "ends": (0, num_blocks - 1),
        "plus": shortened_llama_protected(num_blocks),
        "none": (),
    }
    if rule not in rules:
        raise PolicyError(f"--protect must be one of {', '.join(rules)}, got {rule!r}")
    return rules[rule]


def _score(
    name: str, model: "BuddyForCausalLM", ids: Any, protect: str, how: dict[str, Any], bars: "Bars"
) -> dict[str, Any]:
    from buddy.cli.loading import computed_by
    from buddy.importance.indicators.indicator import build_indicator
    from buddy.importance.indicators.measure import measure
    from buddy.importance.search.orders import ascending_order

    protected = _protected(protect, model.num_blocks)
    scores = measure(
        build_indicator(name, model.backbone),
        ids,
        on_batch=bars.counter(name),
        identity={"indicator": name, **computed_by(model)},
        **how,
    ).tolist()
    # Protected blocks are left out of the order: they are never to go.
    order = [block for block in ascending_order(scores, protected) if block not in protected]
    return {"importance": scores, "removal_order": order}


def _search(
    model: "BuddyForCausalLM", ids: Any, rounds: int | None, how: dict[str, Any], bars: "Bars"
) -> dict[str, Any]:
    from buddy.cli.loading import computed_by
    from buddy.importance.search.sleb import sleb_search

    rounds = max(0, model.num_blocks - 2) if rounds is None else rounds
    removed = bars.add_task("sleb: blocks removed", total=rounds)
    order = sleb_search(
        model.backbone,
        ids,
        rounds,
        on_round=lambda number, block, nll: bars.update(
            removed, completed=number, description=f"sleb: blocks removed, the last {block}"
        ),
        on_candidate=bars.counter("candidates of this round"),
        identity={"indicator": "sleb", **computed_by(model)},
        **how,
    )
    return {"removal_order": list(order.order), "nll": list(order.nll)}


COMMAND = Command(name="importance", group="measure", place=1, run=importance, shares=True)
