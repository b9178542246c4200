"""`buddy search`: the best set of blocks at each of some depths, by exchanges."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.commands.importance import computed_by, measuring
from buddy.errors import BudgetError

if TYPE_CHECKING:
    from buddy.data.examples import Source
    from buddy.data.rows import Note
    from buddy.importance.calibration import Passages
    from buddy.importance.search.searched import SearchedSet
    from buddy.model import BuddyForCausalLM


def search(
    model: Annotated[str, typer.Argument(help="Preset, hub id, folder, GGUF file or checkpoint.")],
    order: Annotated[Path, typer.Option(help="Record of buddy importance to begin with.")],
    depths: Annotated[str, typer.Option(help="Blocks to run, a search each, as in 26,22,18,15.")],
    out: options.RecordOut,
    text: Annotated[str, typer.Option(help="wikitext2, ptb or a text file.")] = "wikitext2",
    data_dir: options.DataDir = None,
    answers: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="In place of text: rows of instructions; the loss is that of their answers.",
        ),
    ] = None,
    windows: Annotated[int, options.count(1, help="Windows of text, or rows.")] = 32,
    tokens: Annotated[int, options.count(2, help="Tokens of a window; of a row, the most.")] = 512,
    batch: Annotated[int, options.count(1, help="Windows or rows at a time.")] = 4,
    dtype: options.Dtype = None,
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
    """
    from buddy.checkpoint.resolve import load_tokenizer
    from buddy.cli.loading import check_room, load_checked, say_if_slow
    from buddy.cli.views.display import stderr
    from buddy.data.examples import Source, check_source
    from buddy.importance.calibration import read_text
    from buddy.importance.search.searched import check_depths, swap_search
    from buddy.policies.measured import read_order

    wanted = _parse(depths)
    rows = None if answers is None else Source(path=answers, stop=windows)
    content = "" if rows else read_text(text, data_dir)
    if rows:
        check_source(rows)
    console = stderr()

    def check(outline: "BuddyForCausalLM") -> None:
        check_depths(read_order(order, outline.resources)[0], wanted, outline.num_blocks)
        check_room(outline, tokens)

    loaded = load_checked(model, check, console, options.FULL, dtype=dtype)
    say_if_slow(loaded, console)
    begun, _ = read_order(order, loaded.resources)
    left_out: list[str] = []
    passages = _passages(load_tokenizer(model), rows or content, windows, tokens, left_out.append)
    for note in left_out:
        console.print(note, style="dim")
    partial = out.with_name(f".{out.name}.partial")
    with measuring(console) as bar:
        tasks = {depth: bar.add_task(f"{depth} blocks") for depth in wanted}

        def on_try(depth: int, found: "SearchedSet") -> None:
            nll = found.loss / passages.num_targets
            about = f"{depth} blocks: {nll:.4f} nats after {found.swaps} exchanges, tried"
            bar.update(tasks[depth], completed=found.tried, total=max_swaps, description=about)

        found = swap_search(
            loaded.backbone,
            passages,
            begun,
            wanted,
            seed=seed,
            max_swaps=max_swaps,
            batch=batch,
            resume=partial,
            identity=computed_by(loaded),
            on_try=on_try,
        )
    config = {
        "model": model,
        "order": str(order),
        "depths": wanted,
        "text": text if answers is None else None,
        "answers": answers,
        "windows": len(passages.ids),
        "left_out": left_out,
        "tokens": tokens,
        "batch": batch,
        "max_swaps": max_swaps,
        "seed": seed,
        "dtype": str(loaded.dtype),
    }
    _save(out, config, loaded.facts(), begun, found, passages.num_targets)
    partial.unlink(missing_ok=True)
    for depth, one in found.items():
        blocks = " ".join(map(str, one.blocks))
        before, after = (loss / passages.num_targets for loss in (one.first_loss, one.loss))
        console.print(f"{depth} blocks: {before:.4f} -> {after:.4f} nats: {blocks}", style="dim")
    sys.stdout.write(f"{out}\n")


def _parse(depths: str) -> list[int]:
    try:
        return [int(depth) for depth in depths.split(",")]
    except ValueError:
        raise BudgetError(f"--depths takes block counts, as in 26,22,18, got {depths!r}") from None


def _passages(
    tokenizer: Any,
    given: "Source | str",
    windows: int,
    tokens: int,
    note: "Note",
) -> "Passages":
    from buddy.data.examples import read_examples
    from buddy.importance.calibration import Passages, answers_alone, cut_windows

    if isinstance(given, str):
        return Passages(cut_windows(tokenizer, given, tokens=tokens, limit=windows, note=note))
    examples = read_examples(given, tokenizer, max_tokens=tokens, note=note)
    if len(examples) < windows:
        note(f"{given.path} gives {len(examples)} of the {windows} rows asked for")
    return answers_alone(examples)


def _save(
    out: Path,
    config: dict[str, Any],
    model: dict[str, Any],
    order: list[int],
    found: "dict[int, SearchedSet]",
    num_targets: int,
) -> None:
    from buddy.records import RunRecord

    results = {
        "removal_order": order,
        "sets": {str(depth): list(one.blocks) for depth, one in found.items()},
        "first_nll": {str(depth): one.first_loss / num_targets for depth, one in found.items()},
        "nll": {str(depth): one.loss / num_targets for depth, one in found.items()},
        "swaps": {str(depth): one.swaps for depth, one in found.items()},
        "tried": {str(depth): one.tried for depth, one in found.items()},
        "targets": num_targets,
    }
    RunRecord(
        kind="searched",
        model=model,
        config=config,
        results=results,
    ).save(out)


COMMAND = Command(name="search", group="measure", place=2, run=search)
