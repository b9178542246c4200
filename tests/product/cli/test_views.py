"""What the terminal shows: numbers stay whole at any width, files hold no ANSI, lines stay few."""

import io
import logging
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from buddy.cli.main import _logged_to_stderr, main
from buddy.cli.views import display, tables
from buddy.cli.views.bars import Bars
from buddy.cli.views.tables import show_table
from buddy.lab.cli import eval_run
from buddy.lab.cli.commands import eval_answers, eval_rouge
from buddy.lab.cli.views.speed_table import show_speed
from tests.product.cli.forked import is_plain

NUMBER = re.compile(r"\d[\d.,]*")
WIDTHS = [200, 80, 60, 40]


def terminal(width):
    return Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system=None, markup=False
    )


def pipe(monkeypatch):
    """stderr as the commands open it, connected to no terminal."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setenv("COLUMNS", "40")
    return display.stderr()


LABELS = ["full", "static:12,11,20,13,10,9,21", "random:1234567890123", "[/bold] :smile:"]


def show_tasks(console):
    columns = [(f"task{place}", "acc") for place in range(4)]
    points = [
        {"label": label, "blocks": 22, "task": task, "metric": metric, "value": 0.6512345}
        | {"stderr": 0.0123}
        for label in LABELS
        for task, metric in columns
    ]
    eval_run.show_points(console, points, columns)
    return ["22", "65.1 ± 1.2"]


def show_perplexity(console):
    points = [
        {"label": label, "blocks": 22, "task": "a-long-name.txt", "metric": "perplexity"}
        | {"value": 12345.678, "stderr": 1.5}
        for label in LABELS
    ]
    eval_run.show_points(console, points, [("a-long-name.txt", "perplexity")])
    return ["22", "1.235e+04 ± 1.5"]


def show_corpus(console):
    figures = [("word_perplexity", 24.48), ("bits_per_byte", 0.975)]
    points = [
        {"label": label, "blocks": 22, "task": "t", "metric": metric, "value": value}
        for label in LABELS
        for metric, value in figures
    ]
    eval_run.show_points(console, points, [("t", metric) for metric, _ in figures])
    return ["22", "24.48", "0.975"]


@pytest.mark.parametrize(("more", "shown"), [({}, ""), ({"budget": "auto"}, "auto ")])
def test_what_no_budget_fixes_is_one_row_over_all_tasks(monkeypatch, more, shown):
    depths = {"piqa": 27.4, "boolq": 28.2, "arc_easy": 26.0}
    points = [
        {"label": "d-llm", "blocks": round(mean), "mean_blocks": mean, "task": task}
        | {"metric": "acc", "value": 0.5, "stderr": 0.01, **more}
        for task, mean in depths.items()
    ]
    console = pipe(monkeypatch)
    eval_run.show_points(console, points, [(task, "acc") for task in depths])
    [row] = [line for line in console.file.getvalue().splitlines() if "d-llm" in line]
    cells = " ".join(f"50.0 ± 1 at {mean:.1f}" for mean in depths.values())
    assert " ".join(row.split()) == f"d-llm {shown}{cells}"


def show_rouge(console):
    def points(sign):
        return [
            {"label": label, "blocks": 22, "reroute": way, "metric": f"rouge{metric}"}
            | {"value": sign * 0.31234, "stderr": 0.01234}
            for label in LABELS
            for way in ("step", "prefill")
            for metric in ("1", "2", "L")
        ]

    execution = [{"distinct_plans_per_answer": 12.3}] * 8
    results = {"points": points(1), "differences": points(-1), "execution": execution}
    eval_rouge._show(console, results)
    return ["31.23 ± 1.23", "-31.23 ± 1.23", "12.3"]


def show_answers(console):
    def points(**more):
        return [
            {"label": label, "blocks": 22, "task": "all", "value": 2.34567, "stderr": 0.0123} | more
            for label in LABELS
        ]

    results = {
        "points": points(metric="nll") + points(metric="answer_nll"),
        "exchanged": points(metric="nll", within="all") + points(metric="nll", within="source"),
        "execution": points(distinct_plans=417),
    }
    eval_answers._show(console, results)
    return ["2.346±0.012", "+2.346±0.012", "417"]


def show_bench(console):
    shares = dict.fromkeys(("blocks", "router", "gather_scatter", "kv_fill", "head", "host"), 1 / 6)
    cell = {"batch": 1, "context": 256, "blocks": 22, "num_blocks": 30, "tokens_per_s": 1234.5}
    cell |= {"speedup_own_dense": 1.235, "speedup_transformers": 12.345, "ideal_speedup": 1.235}
    cell["shares"] = shares
    results = {
        "rounds": [{"name": label} for label in LABELS],
        "cells": [cell] * 8,
        "peak_memory_bytes": 1_234_567_890,
    }
    show_speed(console, results, "native engine")
    return ["22/30", "1,234", "1.24", "12.35", "100%", "16.7", "1,235 MB"]


VIEWS = [show_tasks, show_perplexity, show_corpus, show_rouge, show_answers, show_bench]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("show", VIEWS)
def test_no_number_is_broken_on_a_terminal(show, width):
    console = terminal(width)
    cells = show(console)
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert all(cell in shown for cell in cells)
    rows = [line for line in shown.splitlines() if "┃" not in line]
    known = {number for text in [*cells, *LABELS, shown] for number in NUMBER.findall(text)}
    assert "\u2026" not in shown
    assert known
    assert rows


@pytest.mark.parametrize("show", VIEWS)
def test_in_a_pipe_a_row_is_a_line_whatever_columns_says(monkeypatch, show):
    console = pipe(monkeypatch)
    cells = show(console)
    shown = console.file.getvalue()
    assert is_plain(shown)
    for label in LABELS:
        assert label in shown
    assert all(cell in shown for cell in cells)
    row = next(line for line in shown.splitlines() if LABELS[1] in line)
    assert len(NUMBER.findall(row.replace(LABELS[1], ""))) >= 2


@pytest.mark.parametrize("is_boxed", [True, False])
def test_no_table_in_a_pipe_has_a_box(monkeypatch, is_boxed):
    """Whatever the table is, also of a command that another package adds."""
    table = Table("name", "number", title="two", box=box.HEAVY if is_boxed else None)
    table.add_row("a", "1")
    console = pipe(monkeypatch)
    show_table(console, table)
    assert is_plain(console.file.getvalue())
    console = terminal(80)
    show_table(console, table if not is_boxed else Table("name", box=box.HEAVY))
    assert is_plain(console.file.getvalue()) is not is_boxed


def test_every_table_is_printed_by_show_table():
    """So that each one is plain in a pipe; the panel of a server is for terminals alone."""
    source = Path(tables.__file__).parents[2]
    printed = re.compile(r"console\.print\((table\)|Table\(|Panel\()")
    found = {path.name for path in source.rglob("*.py") if printed.search(path.read_text())}
    assert found == {"tables.py", "serve.py"}


def test_words_are_not_split_on_a_terminal_and_lines_not_in_a_pipe(monkeypatch):
    text = " ".join(f"word{place}" for place in range(30))
    console = terminal(60)
    console.print(text)
    assert set(console.file.getvalue().split()) == set(text.split())
    console = pipe(monkeypatch)
    console.print(text)
    assert console.file.getvalue() == f"{text}\n"


def test_no_color_is_honoured(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = pipe(monkeypatch)
    console.print("text", style="red")
    assert "31m" not in console.file.getvalue()


def tell(monkeypatch, seconds, total, *, keep=False):
    """The lines of a run of `total` steps that takes so long."""
    console, now = pipe(monkeypatch), [0.0]
    with Bars(console, keep=keep, get_time=lambda: now[0]) as bars:
        task = bars.add_task("[/] work", total=total)
        for _ in range(total):
            now[0] += seconds / total
            bars.advance(task)
    return console.file.getvalue().splitlines()


def test_long_work_without_a_terminal_says_a_line_now_and_then(monkeypatch):
    assert tell(monkeypatch, 5, 1000) == []
    assert tell(monkeypatch, 5, 1000, keep=True) == ["[/] work: 1,000/1,000"]
    assert len(tell(monkeypatch, 120, 1000)) == 10
    assert 10 <= len(tell(monkeypatch, 1200, 1000)) <= 40
    assert 30 <= len(tell(monkeypatch, 36_000, 10_000)) <= 150
    assert tell(monkeypatch, 120, 1000)[0] == "[/] work: 100/1,000, 0:01:48 left"


@pytest.mark.parametrize(
    "command",
    [
        *(
            [name]
            for name in ("generate", "chat", "models", "info", "data", "importance", "search")
        ),
        *(
            [name]
            for name in (
                "train",
                "train-budget",
                "train-ledger",
                "observe",
                "bench",
                "eval",
                "plot",
            )
        ),
        *([name] for name in ("serve", "load", "reproduce", "export")),
        *(["eval", name] for name in ("tasks", "ppl", "answers", "gsm8k", "mmlu", "rouge")),
        *(["observe", name] for name in ("ranks", "context")),
        [],
    ],
)
def test_help_reads_well_at_80_columns(monkeypatch, capsys, command):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["buddy", *command, "--help"])
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capsys.readouterr()
    assert (stopped.value.code, err) == (0, "")
    assert out.startswith(" ".join(["Usage: buddy", *command]))
    assert max(map(len, out.splitlines())) <= 80
    listed = out.partition("\nCommands")[2]
    assert "..." not in listed
    assert not re.search(r"<(str|int|float|path|list)", out)
    assert not re.search(r"[\u2500-\u257f\x1b]", out)


def typed(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["buddy", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_help_is_short_too_and_lists_commands_by_what_they_are_for(monkeypatch, capsys):
    assert typed(monkeypatch, capsys, "-h") == typed(monkeypatch, capsys, "--help")
    shown = typed(monkeypatch, capsys, "generate", "-h")
    assert "--max-new-tokens, --max-tokens TOKENS" in " ".join(shown.split())
    groups = re.findall(r"^Commands to (\w+):$", typed(monkeypatch, capsys, "-h"), re.MULTILINE)
    assert groups == ["run", "serve", "measure", "train", "research"]


def test_the_version_is_that_of_the_package(monkeypatch, capsys):
    assert typed(monkeypatch, capsys, "--version") == f"buddy {version('buddy-llm')}\n"


def test_what_was_not_foreseen_is_logged_with_where_it_happened(capsys):
    log = logging.getLogger("buddy")
    with _logged_to_stderr():
        log.warning("one line")
        try:
            (-1).to_bytes()
        except OverflowError:
            log.exception("the engine has failed")
    said = capsys.readouterr().err.splitlines()
    assert said[:3] == ["one line", "the engine has failed", "Traceback (most recent call last):"]
    assert said[-1].startswith("OverflowError: ")
