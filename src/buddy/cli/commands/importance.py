"""`buddy importance`: how much each block of a model matters, and the order to remove them in."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.cli import options
from buddy.cli.command import Command

if TYPE_CHECKING:
    from buddy.model import BuddyForCausalLM


def importance(
    model: Annotated[str, typer.Argument(help="Preset, hub id, folder, GGUF file or checkpoint.")],
    out: options.RecordOut,
    indicator: Annotated[
        str,
        typer.Option(
            help="delta-ppl, taylor, fisher, grad-norm, cosine, block-influence; or sleb, a search."
        ),
    ] = "block-influence",
    text: Annotated[str, typer.Option(help="wikitext2, ptb or a text file.")] = "wikitext2",
    data_dir: options.DataDir = None,
    windows: Annotated[int, options.count(1, help="Windows of text.")] = 32,
    tokens: Annotated[int, options.count(2, help="Tokens of a window.")] = 512,
    batch: Annotated[int, options.count(1, help="Windows at a time.")] = 4,
    dtype: options.Dtype = None,
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
    """
    from buddy.checkpoint.resolve import load_tokenizer
    from buddy.cli.loading import check_room, load_checked, say_if_slow
    from buddy.cli.views.display import stderr
    from buddy.importance.calibration import cut_windows, read_text
    from buddy.importance.search.sleb import check_rounds
    from buddy.records import RunRecord

    _check_indicator(indicator, protect, rounds)
    calibration = read_text(text, data_dir)
    console = stderr()

    def check(outline: "BuddyForCausalLM") -> None:
        check_room(outline, tokens)
        _protected(protect, outline.num_blocks)
        check_rounds(rounds or 0, outline.num_blocks)

    loaded = load_checked(model, check, console, options.FULL, dtype=dtype)
    say_if_slow(loaded, console)
    ids = cut_windows(
        load_tokenizer(model),
        calibration,
        tokens=tokens,
        limit=windows,
        note=lambda text: console.print(text, style="dim"),
    )
    partial = out.with_name(f".{out.name}.partial")
    how = {
        "batch": batch,
        "resume": partial,
        "identity": {"indicator": indicator, **computed_by(loaded)},
    }
    with measuring(console) as bar:
        if indicator == "sleb":
            results = _search(loaded.backbone, ids, rounds, how, bar)
        else:
            protected = _protected(protect, loaded.num_blocks)
            results = _score(indicator, loaded.backbone, ids, protected, how, bar)
    RunRecord(
        kind=f"importance-{indicator}",
        model=loaded.facts(),
        config={
            "model": model,
            "indicator": indicator,
            "text": text,
            "windows": len(ids),
            "tokens": tokens,
            "batch": batch,
            "dtype": str(loaded.dtype),
            "protect": protect,
            "rounds": rounds,
        },
        results=results,
    ).save(out)
    partial.unlink(missing_ok=True)
    order = " ".join(str(block) for block in results["removal_order"])
    console.print(f"least important first: {order}", style="dim")
    sys.stdout.write(f"{out}\n")


def computed_by(model: "BuddyForCausalLM") -> dict[str, Any]:
    """What the values of a measurement depend on besides its settings, for its identity."""
    return {
        "model": model.facts(),
        "dtype": str(model.dtype),
        "device": model.device.type,
        "attention": model.backbone.attention,
        "quant": model.origin.quant,
    }


@contextmanager
def measuring(console: Any) -> Iterator[Any]:
    """Progress bars; Ctrl-C within ends the command and says how to go on."""
    from buddy.cli.views.bars import Bars

    try:
        with Bars(console) as bar:
            yield bar
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here", style="dim")
        raise typer.Exit(130) from None


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
    name: str,
    backbone: Any,
    ids: Any,
    protected: tuple[int, ...],
    how: dict[str, Any],
    bar: Any,
) -> dict[str, Any]:
    from buddy.importance.indicators.indicator import build_indicator
    from buddy.importance.indicators.measure import measure
    from buddy.importance.search.orders import ascending_order

    task = bar.add_task(name)
    scores = measure(
        build_indicator(name, backbone),
        ids,
        on_batch=lambda done, total: bar.update(task, completed=done, total=total),
        **how,
    ).tolist()
    # Protected blocks are left out of the order: they are never to go.
    order = [block for block in ascending_order(scores, protected) if block not in protected]
    return {"importance": scores, "removal_order": order}


def _search(
    backbone: Any, ids: Any, rounds: int | None, how: dict[str, Any], bar: Any
) -> dict[str, Any]:
    from buddy.importance.search.sleb import sleb_search

    rounds = max(0, backbone.num_blocks - 2) if rounds is None else rounds
    removed = bar.add_task("sleb: blocks removed", total=rounds)
    tried = bar.add_task("candidates of this round")
    found = sleb_search(
        backbone,
        ids,
        rounds,
        on_round=lambda number, block, nll: bar.update(
            removed, completed=number, description=f"sleb: blocks removed, the last {block}"
        ),
        on_candidate=lambda done, total: bar.update(tried, completed=done, total=total),
        **how,
    )
    return {"removal_order": list(found.order), "nll": list(found.nll)}


COMMAND = Command(name="importance", group="measure", place=1, run=importance)
