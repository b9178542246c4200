"""The tables by name, and how one is made again from beginning to end."""

import difflib
import importlib
import importlib.util
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Final

from buddy.errors import DataError, ResultError
from buddy.lab.paper.run import Run, check_model
from buddy.lab.paper.table import Collected, Table
from buddy.records import RunRecord
from buddy.settings import build


def _read_tables() -> dict[str, Table]:
    file = resources.files("buddy.lab.paper") / "tables.toml"
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    return {name: build(Table, values, f"tables.toml: {name}") for name, values in tables.items()}


TABLES: Final = _read_tables()


def find_table(name: str) -> Table:
    """A table by its name.

    Raises:
        ResultError: There is none; the nearest names are told.
    """
    if name in TABLES:
        return TABLES[name]
    near = difflib.get_close_matches(name.lower(), TABLES, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(TABLES)};"
    raise ResultError(f"no table {name!r}: {hint} `buddy reproduce --list` shows them all")


def default_folder(name: str, full: bool) -> Path:
    """Where a table's steps go if nothing is said."""
    return Path("runs/reproduce") / (f"{name}-full" if full else name)


def check_request(run: Run) -> None:
    """Refuse what would fail later: data or a package that is missing, methods, the model.

    Raises:
        DataError: Data are missing.
        ResultError: matplotlib is missing, or the table takes no methods or rows.
        ModelError: The model lacks what the table is about.
    """
    request = run.request
    table = find_table(request.table)
    if request.methods and not table.methods:
        having = ", ".join(name for name, other in TABLES.items() if other.methods)
        raise ResultError(f"table {request.table} takes no --method: only {having} do")
    if request.rows is not None and not table.rows:
        raise ResultError(f"table {request.table} draws no rows: leave --limit out")
    if importlib.util.find_spec("matplotlib") is None:
        raise ResultError(
            'figures need matplotlib, which is not installed: pip install "buddy-llm[plots]"'
        )
    check_data(request.table, request.data_dir)
    check_model(run.outline(), request.model, table.model)


def check_data(name: str, data_dir: Path | None) -> None:
    """Refuse a data folder that lacks a file of a table.

    Raises:
        DataError: A file is missing, or the data can only come from a folder.
    """
    table = find_table(name)
    files = [file if file.endswith(".txt") else f"{file}.jsonl" for file in table.files]
    if data_dir is None:
        if table.from_hub or not files:
            return
        raise DataError(f"table {name} needs {', '.join(files)} in a folder: name it by --data-dir")
    missing = [file for file in files if not (data_dir / file).is_file()]
    if missing:
        hub = "; or leave out --data-dir, to take them from the hub" if table.from_hub else ""
        raise DataError(
            f"table {name} needs {', '.join(missing)} in {data_dir}: put the data there in "
            f"lm-eval's field names, a JSON object a line{hub}"
        )


def reproduce(run: Run) -> tuple[Collected, list[Path]]:
    """Take the steps of a table, write its record and draw its figures.

    Returns:
        The table, and the files that were written: the record, then the figures.

    Raises:
        BuddyError: As `check_request` and the steps.
    """
    from buddy.files import check_writable

    request = run.request
    table = find_table(request.table)
    check_request(run)
    request.out.mkdir(parents=True, exist_ok=True)
    path = run.path(f"{request.table}.json")
    check_writable(path)
    module = importlib.import_module(f"buddy.lab.paper.tables.{table.module}")
    collected: Collected = module.collect(run)
    sentences = [table.differs, *([collected.differs] if collected.differs else [])]
    record = RunRecord(
        kind=f"reproduce-{request.table}",
        model=None if collected.facts is None else dict(collected.facts),
        config={
            "table": request.table,
            "model": request.model,
            "full": request.full,
            "dtype": request.dtype,
            "data": "hub" if request.data_dir is None else "local",
            **collected.settings,
            "steps": run.steps,
        },
        results={**collected.results, "differs": sentences},
    )
    record.save(path)
    return collected, [path, *draw_figures(table, path)]


def draw_figures(table: Table, record: Path) -> list[Path]:
    """The figures of a record, beside it."""
    from buddy.lab.plots.figures import draw
    from buddy.lab.plots.output import save_figure
    from buddy.records import read_record

    read: dict[str, Any] = read_record(record)
    paths = []
    for figure in table.figures:
        name = record.stem if len(table.figures) == 1 else f"{record.stem}-{figure}"
        path = record.with_name(f"{name}.png")
        save_figure(draw(figure, [read], width=_width(figure, read)), path)
        paths.append(path)
    return paths


def _width(figure: str, record: dict[str, Any]) -> float:
    """Side by side, panels need more than a column."""
    from buddy.lab.plots.figures import COLUMN_INCHES

    wide = figure == "panels" and len(record["results"]["panels"]) > 1
    return 2 * COLUMN_INCHES if wide else COLUMN_INCHES
