"""Rows that nobody should write: understood, counted, or refused with their line and field."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from buddy.cli.main import app
from buddy.data import rows as data_rows
from buddy.data.examples import Source, check_source, read_examples
from buddy.data.rows import read_rows
from buddy.errors import BuddyError, DataError, ResultError
from buddy.importance.calibration import read_text
from buddy.lab.evaluation.local_tasks import LOCAL_TASKS, read_split
from buddy.lab.evaluation.rouge.samsum import read_dialogues
from buddy.lab.evaluation.tasks.export import export_rows, read_questions
from buddy.settings import read_recipe
from buddy.training.predictor.recipe import BudgetRecipe
from buddy.training.predictor.run import train_budget
from buddy.training.router.recipe import Recipe
from buddy.training.router.run import train
from buddy.training.run import RunListener
from tests.lab.evaluation.task_rows import ROWS, write
from tests.product.training.made import save_stage_1, write_recipe
from tests.tiny import tiny_model
from tests.words import word_tokenizer

GOOD = '{"prompt": "w3 w4", "completion": " w5"}'
TOKENIZER = word_tokenizer()


def examples_of(path, content, *, told=None, max_tokens=16):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    note = (lambda text: None) if told is None else told.append
    source = Source(path=str(path), template="alpaca")
    return read_examples(source, TOKENIZER, max_tokens=max_tokens, note=note)


UNREADABLE = [
    (b"", "is empty"),
    (b" \n\r\n\n", "is empty"),
    (b"[]", "is empty"),
    (b"\xef\xbb\xbf", "is empty"),
    (b"\xff\xfe" + "{}".encode("utf-16-le"), "line 1, is no JSON"),
    (GOOD.encode() + b'\n{"prompt": "\xff"}', "line 2, is no JSON"),
    (f"{GOOD}\n\n{{", "line 3, is no JSON"),
    (f"{GOOD}\nnull", "line 2, is no JSON object, got null"),
    (f"{GOOD}\n3", "line 2, is no JSON object, got 3"),
    (f"[{GOOD}, [1]]", "row 2, is no JSON object, got .1."),
    (f"[{GOOD}\n", "is no JSON"),
    (f"{GOOD}{GOOD}", "line 1, is no JSON: Extra data"),
    (f"{GOOD}\n" + "[" * 100_000, "line 2, is no JSON that can be read: it nests too deeply"),
    (
        '{"prompt": "w3", "prompt": "w4"}',
        "line 1, is no JSON: an object has the key 'prompt' twice",
    ),
    ('{"prompt": "\\ud800", "completion": "w3"}', "line 1, has a text with half a surrogate pair"),
    ('{"prompt": NaN}', "line 1, is no JSON: NaN is not a finite number"),
    ("\0", "line 1, is no JSON"),
]
WRONG = [
    ('{"instruction": "w3", "output": null}', "field output: expected a text, got null"),
    ('{"instruction": "w3", "output": 4}', "field output: expected a text, got 4"),
    ('{"instruction": null, "output": "w4"}', "field instruction: expected a text, got null"),
    ('{"instruction": "w3", "input": ["w4"], "output": "w4"}', "field input: expected a text"),
    ('{"prompt": ["w3"], "completion": "w4"}', r"field prompt: expected a text, got \['w3'\]"),
    ('{"prompt": "w3", "completion": {"a": 1}}', "field completion: expected a text, got {"),
    ('{"prompt": "w3"}', "has the fields prompt: expected instruction and output"),
    ("{}", "has the fields none: expected instruction and output"),
    (json.dumps({"x" * 9000: 1}), "has the fields xxx"),
    (
        json.dumps({"prompt": "w3", "completion": ["y" * 9000]}),
        "field completion: expected a text, got .'yyy.*[.]{3}$",
    ),
    ('{"prompt": "w3", "completion": "w4", "source": 5}', "field source: expected a text, got 5"),
]


@pytest.mark.parametrize(("content", "says"), UNREADABLE)
def test_a_file_that_is_no_rows_is_refused_with_its_line(tmp_path, content, says):
    with pytest.raises(DataError, match=says) as caught:
        examples_of(tmp_path / "rows.jsonl", content)
    assert "\n" not in str(caught.value)
    assert "rows.jsonl" in str(caught.value)


@pytest.mark.parametrize(("row", "says"), WRONG)
def test_a_row_that_cannot_be_used_is_refused_with_line_and_field(tmp_path, row, says):
    with pytest.raises(DataError, match=f"rows.jsonl, line 3, {says}") as caught:
        examples_of(tmp_path / "rows.jsonl", f"{GOOD}\n\n{row}\n")
    assert len(str(caught.value)) < 400 + len(str(tmp_path))
    with pytest.raises(DataError, match=f"rows.json, row 2, {says}"):
        examples_of(tmp_path / "rows.json", f"[{GOOD},\n{row}]")


@pytest.mark.parametrize(
    "content",
    [
        f"{GOOD}\n{GOOD}",
        f"{GOOD}\r\n\r\n{GOOD}\r\n",
        f"\ufeff{GOOD}\n\ufeff{GOOD}\n",
        f" [{GOOD},\n{GOOD}]\n",
        f"\ufeff[{GOOD}, {GOOD}]",
        f'{GOOD}\n{{"prompt": "w3 w4", "completion": " w5", "source": null, "more": {{}}}}',
    ],
)
def test_rows_are_the_same_in_every_form_of_a_file(tmp_path, content):
    one, other = examples_of(tmp_path / "rows.jsonl", content)
    assert (one.prompt, one.answer) == (other.prompt, other.answer) == ((3, 4), (5,))


def test_separators_of_unicode_and_nul_stand_in_a_row(tmp_path):
    (row,) = examples_of(tmp_path / "rows", '{"prompt": "w3\u2028w4\\u0000", "completion": "w5"}')
    assert row.prompt[:2] == (3, 4)


def test_a_line_may_be_long(tmp_path):
    row = json.dumps({"prompt": "w3", "completion": "w4", "more": "x" * 10_000_000})
    assert len(examples_of(tmp_path / "rows.jsonl", row)) == 1


def test_rows_without_an_example_are_counted_once(tmp_path):
    lines = [
        GOOD,
        '{"instruction": "w3", "output": ""}',
        '{"prompt": "w3", "completion": " \\n "}',
        '{"prompt": "", "completion": "w4"}',
        json.dumps({"prompt": "w3 " * 100_000, "completion": "w4"}),
        GOOD,
    ]
    told = []
    assert len(examples_of(tmp_path / "rows.jsonl", "\n".join(lines), told=told)) == 2
    assert told == [
        f"{tmp_path / 'rows.jsonl'}: of 6 rows, 2 with an empty answer, 1 with an empty prompt, "
        "1 with a prompt of 16 tokens or more left out"
    ]
    told.clear()
    with pytest.raises(DataError, match="no usable row from 0 to its end: 1 with an empty answer"):
        examples_of(tmp_path / "rows.jsonl", lines[1], told=told)
    assert told == []


READERS = {
    "rows": lambda path: read_rows(path),
    "source": lambda path: check_source(Source(path=str(path))),
    "questions": lambda path: read_questions(path),
    "text": lambda path: read_text(str(path)),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_regular_file_is_refused(tmp_path, reader):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(BuddyError, match="expected a regular file"):
            READERS[reader](path)
    for path in (tmp_path / "none", Path("a\0b"), Path("~no-such-user/x"), Path("x" * 5000)):
        with pytest.raises(BuddyError, match="cannot be read"):
            READERS[reader](path)


def test_a_file_that_no_memory_holds_is_refused(tmp_path):
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(data_rows.MAX_DATA_BYTES + 1)  # sparse: it takes no room
    for read in (READERS["rows"], READERS["text"]):
        with pytest.raises(BuddyError, match="4,294,967,297 bytes: at most 4,294,967,296 are read"):
            read(tmp_path / "huge")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf \n", "is empty"),
        (b"a\xffb", "is no UTF-8 text"),
    ],
)
def test_texts_that_cannot_be_read(tmp_path, content, says):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(ResultError, match=f"calibration text .*{says}"):
        read_text(str(tmp_path / "text"))


def test_a_text_is_the_same_whatever_ends_its_lines(tmp_path):
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfw3\r\nw4\rw5\n")
    assert read_text(str(tmp_path / "text")) == "w3\nw4\nw5\n"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{}", "line 1, has no question"),
        ('{"completion": "w3"}', "line 1, has no question"),
        ('{"prompt": ["w3"]}', "line 1, field prompt: expected a text"),
        ('{"instruction": 3}', "line 1, field instruction: expected a text, got 3"),
    ],
)
def test_questions_to_leave_out_are_texts(tmp_path, row, says):
    (tmp_path / "seen.jsonl").write_text(row)
    with pytest.raises(DataError, match=says):
        read_questions(tmp_path / "seen.jsonl")


BAD_FIELDS = [
    ("arc_easy", {"answerKey": "D"}, "field answerKey: expected one of the labels of choices"),
    (
        "arc_easy",
        {"choices": {"text": ["a"], "label": ["A", "B"]}},
        "field choices: expected an obj",
    ),
    ("arc_easy", {"choices": None}, "field choices: expected an object .*, got null"),
    ("openbookqa", {"answerKey": None}, "field answerKey"),
    ("boolq", {"label": "1"}, "field label: expected one of 0, 1, got '1'"),
    ("boolq", {"label": True}, "field label: expected one of 0, 1, got True"),
    ("boolq", {"passage": ""}, "field passage: expected a text that is not empty, got ''"),
    ("gsm8k", {"answer": 5}, "field answer"),
    ("hellaswag", {"label": ""}, "field label: expected the place of an ending"),
    ("hellaswag", {"label": 4}, "field label"),
    ("hellaswag", {"endings": "ab"}, "field endings: expected a list of 2 texts or more"),
    ("piqa", {"label": 2}, "field label"),
    ("piqa", {"sol1": None}, "field sol1: expected a text, got null"),
    ("social_iqa", {"label": "0"}, "field label"),
    ("winogrande", {"sentence": "no gap"}, "field sentence: expected a text with _ in it"),
    ("winogrande", {"answer": 1}, "field answer: expected one of '1', '2', got 1"),
    ("mmlu", {"choices": ["a"]}, "field choices: expected a list of 4 texts"),
    ("mmlu", {"answer": 4}, "field answer"),
    ("lambada_openai", {"text": "alone"}, "field text: expected a text of 2 words or more"),
    ("wikitext", {"page": [1]}, "field page"),
]


@pytest.mark.parametrize(("name", "changed", "says"), BAD_FIELDS)
def test_a_row_that_lm_eval_cannot_ask_is_refused(tmp_path, name, changed, says):
    write(tmp_path, name, [ROWS[name], ROWS[name] | changed], LOCAL_TASKS[name].split)
    task = LOCAL_TASKS[name]
    with pytest.raises(DataError, match=f"line 2, {says}"):
        read_split(tmp_path, task.folder, task.split, task.fields)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"id": 1, "dialogue": 3, "summary": "b"}, "field dialogue: expected a text, got 3"),
        ({"id": 1, "dialogue": "a", "summary": None}, "field summary: expected a text, got null"),
        ({"id": [], "dialogue": "a", "summary": "b"}, "field id: expected a text or a number"),
        ({"dialogue": "a", "summary": "b"}, "has no field id"),
    ],
)
def test_dialogues_are_texts(tmp_path, row, says):
    (tmp_path / "samsum").mkdir()
    (tmp_path / "samsum/validation.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=f"line 1, {says}"):
        read_dialogues(tmp_path)


def test_dialogues_without_a_summary_are_counted(tmp_path):
    (tmp_path / "samsum").mkdir()
    rows = [{"id": n, "dialogue": "A: hi", "summary": "b" * (n % 2)} for n in range(4)]
    for split in ("validation", "train"):
        (tmp_path / f"samsum/{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    told = []
    assert len(read_dialogues(tmp_path, note=told.append)) == 2
    assert len(export_rows(["samsum"], data_dir=tmp_path, note=told.append)) == 2
    assert told == ["samsum: of 4 rows, 2 with no dialogue or summary left out"] * 2
    (tmp_path / "samsum/validation.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(DataError, match="no row has a dialogue and a summary"):
        read_dialogues(tmp_path)


def test_a_draw_that_leaves_nothing_is_refused(tmp_path):
    (tmp_path / "samsum").mkdir()
    row = {"id": 1, "dialogue": "A: hi", "summary": "b"}
    (tmp_path / "samsum/train.jsonl").write_text(json.dumps(row))
    rows = export_rows(["samsum"], data_dir=tmp_path)
    with pytest.raises(DataError, match="no row is left"):
        export_rows(["samsum"], data_dir=tmp_path, without=rows)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"instruction": "w3", "output": None}], "a/b, row 1, field output: expected a text"),
        ([{"prompt": "w3", "completion": 4.5}], "a/b, row 1, field completion: expected a text"),
        (["train"], "of a/b has no rows of fields"),
        ([], "it ends before"),
    ],
)
def test_rows_of_the_hub_are_checked_as_those_of_files_are(monkeypatch, rows, says):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    with pytest.raises(DataError, match=says):
        read_examples(Source(hub="a/b", template="alpaca"), TOKENIZER, max_tokens=16)


def test_whatever_the_hub_says_is_one_line(monkeypatch):
    import datasets
    from datasets.exceptions import DatasetGenerationError

    def fail(name, split):
        raise DatasetGenerationError("An error occurred\nwhile generating")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    for read in (
        lambda: read_examples(Source(hub="a/b"), TOKENIZER, max_tokens=16),
        lambda: read_dialogues(None),
    ):
        with pytest.raises(DataError, match="cannot be had from the hub: An error occurred") as one:
            read()
        assert "\n" not in str(one.value)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_NAMES = sorted(
    {"instruction", "output", "input", "prompt", "completion", "source", "id", "dialogue"}
    | {"summary"}.union(*(task.fields for task in LOCAL_TASKS.values()))
)
_ROWS = st.lists(st.dictionaries(st.sampled_from(_NAMES), _JSON | st.text()) | _JSON, max_size=4)


@settings(max_examples=100, deadline=None)
@given(_ROWS, st.booleans(), st.binary(max_size=8))
def test_of_any_rows_only_examples_or_our_error_come(tmp_path_factory, rows, is_array, noise):
    folder = tmp_path_factory.getbasetemp()
    text = json.dumps(rows) if is_array else "\n".join(map(json.dumps, rows))
    for content in (text.encode(), text.encode() + noise, noise):
        with suppress(DataError):
            assert examples_of(folder / "any.jsonl", content)
        for read in READERS.values():
            with suppress(DataError, ResultError):
                read(folder / "any.jsonl")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(ROWS)), st.data())
def test_of_any_fields_of_a_task_only_rows_or_our_error_come(tmp_path_factory, name, data):
    task = LOCAL_TASKS[name]
    folder = tmp_path_factory.getbasetemp()
    row = dict(ROWS[name])
    for field in data.draw(st.sets(st.sampled_from(sorted(task.fields)), max_size=2)):
        row[field] = data.draw(_JSON)
    write(folder, name, [row], task.split)
    with suppress(DataError):
        assert set(read_split(folder, task.folder, task.split, task.fields)[0]) == set(task.fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, a checkpoint of it, and rows of which two give no example."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    save_stage_1(path / "stage1")
    lines = [GOOD] * 4 + ['{"prompt": "w3", "completion": ""}'] * 2
    (path / "rows.jsonl").write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("stage", [1, 2])
def test_what_training_leaves_out_is_said_logged_and_recorded(folder, tmp_path, stage):
    rows = folder / "rows.jsonl"
    changes = [f"data.train=[{{path='{rows}'}}]", "data.validation=[]", "optim.steps=2"]
    save_stage_1(tmp_path / "stage1")
    path, told = write_recipe(tmp_path), []
    if stage == 1:
        changes += [f"model.name='{folder}'", "router.prior=none", "lora.rank=2"]
        recipe = read_recipe(Recipe, path, changes)
        train(recipe, tmp_path / "out", listener=RunListener(warned=told.append))
    else:
        recipe = read_recipe(BudgetRecipe, path, changes)
        train_budget(recipe, tmp_path / "out", listener=RunListener(warned=told.append))
    left_out = [f"{rows}: of 6 rows, 2 with an empty answer left out"]
    assert told[:1] == left_out
    first = json.loads((tmp_path / "out/log.jsonl").read_text().splitlines()[0])
    assert first == {"step": 0, "kind": "data", "left_out": left_out}
    record = json.loads((tmp_path / "out/record.json").read_text())
    assert record["results"]["left_out"] == left_out
    assert record["results"]["rows"] == 4


def test_what_an_evaluation_leaves_out_is_said_and_recorded(folder, tmp_path):
    out = tmp_path / "answers.json"
    arguments = ["eval", "answers", str(folder / "rows.jsonl"), "--model", str(folder)]
    done = CliRunner().invoke(app, [*arguments, "--out", str(out), "--template", "alpaca"])
    assert done.exit_code == 0, (done.stderr, done.exception)
    text = f"{folder / 'rows.jsonl'}: of 6 rows, 2 with an empty answer left out"
    assert done.stderr.count(text) == 1
    assert json.loads(out.read_text())["config"]["left_out"] == [text]
