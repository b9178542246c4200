"""The mix that ships is balanced, right in its sums and its code, and of short rows."""

import re
from pathlib import Path

import pytest

from buddy.data.examples import Source, read_examples
from buddy.data.mix import MIX_KINDS, mix_path
from buddy.data.rows import read_rows
from tests.words import word_tokenizer

ROOT = Path(__file__).parents[3]
ROWS = [row for _, row in read_rows(mix_path())]
SUM = re.compile(r"([\d(][\d. +*/()-]*[\d)]) = (\d+(?:\.\d+)?)")


def rows(kind):
    return [row for row in ROWS if row["source"] == kind]


def test_the_kinds_take_turns_and_each_row_is_an_example():
    source = Source(path=str(mix_path()), template="alpaca")
    examples = read_examples(source, word_tokenizer(), max_tokens=10_000)
    assert [example.source for example in examples] == list(MIX_KINDS) * 60


def test_no_field_is_empty_and_no_line_ends_in_a_space():
    for row in ROWS:
        for text in row.values():
            assert text.strip(), row
            assert not re.search(r"[ \t]$", text, re.MULTILINE), row


def test_rows_are_short():
    """At most 127 tokens of SmolLM2 for a prompt in its template, 148 for an answer."""
    for row in ROWS:
        prompt = row.get("prompt") or row["instruction"] + row.get("input", "")
        assert len(prompt) <= 310, row
        assert 50 <= len(row.get("completion") or row["output"]) <= 660, row


@pytest.mark.parametrize("kind", MIX_KINDS)
def test_openings_differ(kind):
    field = {"summaries": "input", "instructions": "instruction", "maths": "instruction"}
    openings = {" ".join(row[field.get(kind, "prompt")].split()[:8]) for row in rows(kind)}
    assert len(openings) == 60


def test_every_sum_is_right_and_the_last_gives_the_answer():
    for row in rows("maths"):
        sums = SUM.findall(row["output"])
        assert len(sums) == row["output"].count("=") >= 2, row
        for left, right in sums:
            assert eval(left) == pytest.approx(float(right)), row
        answer = re.search(r"\nThe answer is (\d+(?:\.\d+)?)\.$", row["output"])
        assert answer, row
        assert float(answer[1]) == float(sums[-1][1]), row


def test_code_compiles():
    for row in rows("code"):
        compile(row["prompt"] + row["completion"], row["prompt"], "exec")


def test_the_wheel_carries_the_mix_and_its_licence():
    wheel = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    carried = {file.distribution_path for file in wheel.recurse_included_files()}
    assert {"buddy/data/shipped/mix.jsonl", "buddy/data/shipped/NOTICE"} <= carried
