"""`buddy search`: the best set of blocks at each of some depths, by exchanges."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.cli.commands.importance import computed_by, measuring

if TYPE_CHECKING:
    from buddy.data.rows import Note
    from buddy.importance.calibration import Passages
    from buddy.importance.search.searched import SearchedSet


def search(
    model: Annotated[str, typer.Argument(help="Preset, hub id, folder, GGUF file or checkpoint.")],
    order: Annotated[Path, typer.Option(help="Record of buddy importance to begin with.")],
    depths: Annotated[str, typer.Option(help="Blocks to run, a search each, as in 26,22,18,15.")],
    out: Annotated[Path, typer.Option(help="Where the RunRecord goes (JSON).")],
    text: Annotated[str, typer.Option(help="wikitext2, ptb or a text file.")] = "wikitext2",
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the named corpora.")] = None,
    answers: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="In place of text: rows of instructions; the loss is that of their answers.",
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text, or rows.")] = 32,
    tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of a window; of a row, the most.")
    ] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Windows or rows at a time.")] = 4,
    max_swaps: Annotated[
        int | None,
        typer.Option(min=0, help="Exchanges to try at each depth; until none helps if not given."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the order in which they are tried.")] = 0,
) -> None:
    """Search the best set of blocks at each depth, whatever the sets at others.

    One executed block goes and a skipped one comes, as long as that lowers the loss. Interrupted,
    the same command goes on where it stopped. Use the result with `--policy searched:FILE.json`.
    """
    from buddy.cli.views.display import fetch_progress, stderr
    from buddy.files import check_writable
    from buddy.hub.loading import load_tokenizer
    from buddy.importance.search.searched import swap_search
    from buddy.model import BuddyForCausalLM
    from buddy.policies.measured import read_order

    check_writable(out)
    wanted = _parse(depths)
    console = stderr()
    with fetch_progress(console) as on_progress:
        loaded = BuddyForCausalLM.from_pretrained(
            model, policy="full", merge_adapter=True, on_progress=on_progress
        )
    begun, _ = read_order(order, loaded.resources)
    left_out: list[str] = []
    passages = _passages(
        load_tokenizer(model), text, data_dir, answers, windows, tokens, left_out.append
    )
    for note in left_out:
        console.print(note, style="dim")
    dtype = str(loaded.dtype)
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
            resume=out.with_name(f".{out.name}.partial"),
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
        "dtype": dtype,
    }
    _save(out, config, loaded.facts(), begun, found, passages.num_targets)
    for depth, one in found.items():
        blocks = " ".join(map(str, one.blocks))
        before, after = (loss / passages.num_targets for loss in (one.first_loss, one.loss))
        console.print(f"{depth} blocks: {before:.4f} -> {after:.4f} nats: {blocks}", style="dim")
    sys.stdout.write(f"{out}\n")


def _parse(depths: str) -> list[int]:
    from buddy.errors import BudgetError

    try:
        return [int(depth) for depth in depths.split(",")]
    except ValueError:
        raise BudgetError(f"--depths takes block counts, as in 26,22,18, got {depths!r}") from None


def _passages(
    tokenizer: Any,
    text: str,
    data_dir: Path | None,
    answers: str | None,
    windows: int,
    tokens: int,
    note: "Note",
) -> "Passages":
    from buddy.data.examples import Source, read_examples
    from buddy.importance.calibration import Passages, answers_alone, cut_windows, read_text

    if answers is None:
        content = read_text(text, data_dir)
        return Passages(cut_windows(tokenizer, content, tokens=tokens, limit=windows))
    source = Source(path=answers, stop=windows)
    return answers_alone(read_examples(source, tokenizer, max_tokens=tokens, note=note))


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
