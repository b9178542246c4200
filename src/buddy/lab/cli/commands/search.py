"""`buddy search`: the best set of blocks at each of some depths, by exchanges."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.commands.importance import measuring, save_record
from buddy.errors import BudgetError
from buddy.hub.presets import ROUTED_MODEL
from buddy.processes import launched

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from buddy.cli.views.bars import Bars
    from buddy.data.examples import Source
    from buddy.lab.search.passages import Passages
    from buddy.lab.search.searched import SearchedSet
    from buddy.model import BuddyForCausalLM


@dataclass(frozen=True, kw_only=True, slots=True)
class PassageOptions(options.CalibrationOptions):
    """The text, or the answers, that sets of blocks are compared on."""

    windows: Annotated[
        int, options.count(1, "--limit", "--windows", help="Most windows of text, or rows.")
    ] = 32
    tokens: Annotated[int, options.count(2, help="Tokens of a window; of a row, the most.")] = 512
    batch: Annotated[int, options.count(1, help="Windows or rows at a time.")] = 4
    answers: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="In place of text: rows of instructions; the loss is that of their answers.",
        ),
    ] = None

    def source(self) -> "Source | str":
        """Rows that can be read, or the text itself.

        Raises:
            DataError: The file is no good.
        """
        from buddy.data.examples import Source, check_source
        from buddy.importance.calibration import read_text

        if self.answers is None:
            return read_text(self.text, self.data_dir)
        rows = Source(path=self.answers, stop=self.windows)
        check_source(rows)
        return rows


@options.on_device
@options.grouped
def search(
    order: Annotated[Path, typer.Option(help="Record of buddy importance to begin with.")],
    depths: Annotated[str, typer.Option(help="Blocks to run, a search each, as in 26,22,18,15.")],
    out: options.RecordOut,
    model: options.Model = ROUTED_MODEL,
    *,
    passages: PassageOptions,
    max_swaps: Annotated[
        int | None,
        options.count(0, help="Exchanges to try at each depth; until none helps if not given."),
    ] = None,
    seed: Annotated[int, options.seed("Seed of the order in which they are tried.")] = 0,
) -> None:
    """Search the best set of blocks at each of some depths.

    No set need be part of another. One executed block goes and a skipped one comes, as long as
    that lowers the loss. Interrupted, the same command goes on where it stopped. Use the result
    with `--policy searched:FILE.json`.

    Example: `buddy search --order order.json --depths 22,18 --out sets.json`
    """
    from buddy.checkpoint.resolve import resolve
    from buddy.cli.loading import computed_by, load_to_measure
    from buddy.cli.views.display import stderr
    from buddy.lab.search.searched import check_depths, swap_search
    from buddy.policies.measured import read_order

    wanted, source, console = _parse(depths), passages.source(), stderr()

    def check(outline: "BuddyForCausalLM") -> None:
        check_depths(read_order(order, outline.resources)[0], wanted, outline.num_blocks)

    resolved = resolve(model)
    loaded = load_to_measure(resolved, passages.tokens, console, dtype=passages.dtype, check=check)
    begun, _ = read_order(order, loaded.resources)
    cut, left_out = _cut(source, resolved.load_tokenizer(), passages, console)
    partial = out.with_name(f".{out.name}.partial")
    with measuring(console, out) as bars:
        sets = swap_search(
            loaded.backbone,
            cut,
            begun,
            wanted,
            seed=seed,
            max_swaps=max_swaps,
            batch=passages.batch,
            resume=partial,
            ranks=launched(),
            identity=computed_by(loaded),
            on_try=_shown(bars, wanted, max_swaps, cut.num_targets),
        )
    config = {
        "model": model,
        "order": str(order),
        "depths": wanted,
        "text": passages.text if passages.answers is None else None,
        "answers": passages.answers,
        "windows": len(cut.ids),
        "left_out": left_out,
        "tokens": passages.tokens,
        "batch": passages.batch,
        "max_swaps": max_swaps,
        "seed": seed,
        "dtype": str(loaded.dtype),
    }
    results = _results(begun, sets, cut.num_targets)
    save_record(out, partial, "searched", loaded, config, results)
    _show(console, results)
    sys.stdout.write(f"{out}\n")


def _parse(depths: str) -> list[int]:
    try:
        return [int(depth) for depth in depths.split(",")]
    except ValueError:
        raise BudgetError(f"--depths takes block counts, as in 26,22,18, got {depths!r}") from None


def _cut(
    source: "Source | str", tokenizer: Any, passages: PassageOptions, console: "Console"
) -> "tuple[Passages, list[str]]":
    """Windows of the text, or answers after their instructions; and which were left out, said."""
    from buddy.data.examples import read_examples
    from buddy.importance.calibration import cut_windows
    from buddy.lab.search.passages import Passages, answers_alone

    tokens, limit, notes = passages.tokens, passages.windows, list[str]()
    if isinstance(source, str):
        ids = cut_windows(tokenizer, source, tokens=tokens, limit=limit, note=notes.append)
        cut = Passages(ids)
    else:
        examples = read_examples(source, tokenizer, max_tokens=tokens, note=notes.append)
        if len(examples) < limit:
            notes.append(f"{source.path} gives {len(examples)} of the {limit} rows asked for")
        cut = answers_alone(examples)
    for note in notes:
        console.print(note, style="dim")
    return cut, notes


def _shown(
    bars: "Bars", depths: list[int], max_swaps: int | None, num_targets: int
) -> "Callable[[int, SearchedSet], None]":
    """A bar for each depth, and what moves it on."""
    tasks = {depth: bars.add_task(f"{depth} blocks") for depth in depths}

    def on_try(depth: int, best: "SearchedSet") -> None:
        nll = best.loss / num_targets
        about = f"{depth} blocks: {nll:.4f} nats after {best.swaps} exchanges, tried"
        bars.update(tasks[depth], completed=best.tried, total=max_swaps, description=about)

    return on_try


def _results(order: list[int], sets: "dict[int, SearchedSet]", num_targets: int) -> dict[str, Any]:
    by_depth = {str(depth): best for depth, best in sets.items()}
    return {
        "removal_order": order,
        "sets": {depth: list(best.blocks) for depth, best in by_depth.items()},
        "first_nll": {depth: best.first_loss / num_targets for depth, best in by_depth.items()},
        "nll": {depth: best.loss / num_targets for depth, best in by_depth.items()},
        "swaps": {depth: best.swaps for depth, best in by_depth.items()},
        "tried": {depth: best.tried for depth, best in by_depth.items()},
        "targets": num_targets,
    }


def _show(console: "Console", results: dict[str, Any]) -> None:
    """A line for each depth: the loss before and after, and the blocks."""
    for depth, blocks_of_depth in results["sets"].items():
        before, after = results["first_nll"][depth], results["nll"][depth]
        blocks = " ".join(map(str, blocks_of_depth))
        console.print(f"{depth} blocks: {before:.4f} -> {after:.4f} nats: {blocks}", style="dim")


COMMAND = Command(name="search", group="measure", place=2, run=search, shares=True)
