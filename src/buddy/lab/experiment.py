"""Parts that the scripts of `benchmarks/` share: command line, turns, tables, and record."""

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from buddy.errors import BuddyError, ResultError
from buddy.files import check_writable
from buddy.records import RunRecord

Case = TypeVar("Case")
Result = TypeVar("Result")


def arguments(doc: str | None, *, out: bool = True) -> argparse.ArgumentParser:
    """The command line of a script.

    Args:
        doc: The script's docstring.
        out: Whether it must name a file by `--out`.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if out:
        parser.add_argument("--out", type=_writable, required=True)
    return parser


def _writable(text: str) -> Path:
    try:
        check_writable(Path(text))
    except ResultError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def run(main: Callable[[], None]) -> None:
    """Run a script; an error of ours ends it with one line."""
    try:
        main()
    except BuddyError as error:
        sys.exit(str(error))


def save(
    out: Path,
    kind: str,
    results: dict[str, Any],
    *,
    config: argparse.Namespace | dict[str, Any],
    model: dict[str, Any] | None = None,
) -> None:
    """Write the record of a script.

    Args:
        out: File.
        kind: Of the record.
        results: What was measured.
        config: What could have been set otherwise; of a command line, every argument as a text.
        model: Facts of the model; None of several.

    Raises:
        ResultError: It cannot be written.
    """
    if isinstance(config, argparse.Namespace):
        config = texts(config)
    RunRecord(kind=kind, model=model, config=config, results=results).save(out)


def values(config: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a command line, but for its output."""
    return {name: value for name, value in vars(config).items() if name != "out"}


def texts(config: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a command line, each as a text."""
    return {name: str(value) for name, value in vars(config).items()}


def take_turns(
    names: Sequence[str],
    cases: Sequence[Case],
    rounds: int,
    measure: Callable[[str, Case], Result],
    *,
    title: str = "Rounds",
) -> dict[Case, list[dict[str, Result]]]:
    """What each subject gives in each round of each case, by case.

    Subjects run in a new order each time, so that a drift of the machine meets all alike; a ratio
    is taken within a round. A first round warms up, and does not count.

    Args:
        names: Of the subjects.
        cases: What each of them is asked.
        rounds: That count.
        measure: Runs a subject on a case.
        title: Of the bar on a terminal.
    """
    from rich.console import Console
    from rich.progress import track

    draw = random.Random(0)
    seen: dict[Case, list[dict[str, Result]]] = {case: [] for case in cases}
    console = Console(stderr=True)
    for number in track(range(rounds + 1), title, console=console, transient=True):
        for case in cases:
            results = {name: measure(name, case) for name in draw.sample(names, len(names))}
            if number:
                seen[case].append(results)
    return seen


def median(values: Iterable[float]) -> float:
    """The median of what rounds gave."""
    return statistics.median(list(values))


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]], *, texts: int = 1) -> str:
    """A table as pages have it: so many columns of texts, then numbers to the right."""
    marks = "---|" * texts + "---:|" * (len(head) - texts)
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{marks}", *lines[1:]])


def show(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Show a table on stderr: texts in the first column, numbers in the others."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left", no_wrap=not place)
    for cells in rows:
        table.add_row(*map(str, cells))
    Console(stderr=True).print(table)


def by_source(files: Iterable[str | Path], tokenizer: Any, max_tokens: int) -> dict[str, list[Any]]:
    """Examples of files of instruction rows, by source, in the order of their first ones."""
    from buddy.data import examples

    sources = [examples.Source(path=str(path)) for path in files]
    return examples.by_source(examples.read_all(sources, tokenizer, max_tokens=max_tokens))


def generate(model: Any, ids: Any, new_tokens: int, **options: Any) -> Any:
    """Greedy generation of exactly so many tokens after each row of a batch without pads."""
    import torch

    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        **options,
    )


def phase_seconds(trace: Any) -> dict[str, float]:
    """Seconds of a traced generation: its prefill, and the median of its decode steps."""
    ends = [step.ended_s for step in trace.steps]
    steps = [after - before for before, after in itertools.pairwise(ends)]
    return {
        "decode_s": statistics.median(steps),
        "prefill_s": ends[0] - trace.steps[0].started_s,
    }
