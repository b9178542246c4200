"""Right and wrong answers, from lm-eval's tasks to tokens."""

import json

import pytest

from buddy.data.examples import Source
from buddy.errors import DataError
from buddy.lab.evaluation.local_tasks import LOCAL_TASKS
from buddy.lab.evaluation.tasks.export import export_rows
from buddy.lab.evaluation.tasks.loading import load_tasks
from buddy.methods.pudding.questions import read_questions
from tests.lab.evaluation.task_rows import ROWS, write
from tests.words import say, word_tokenizer

CHOSEN = ("arc_easy", "boolq", "hellaswag", "piqa", "winogrande")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name in CHOSEN:
        write(folder, name, [ROWS[name]])
        write(folder, name, [ROWS[name]], LOCAL_TASKS[name].split)
    write(folder, "gsm8k", [ROWS["gsm8k"]])
    rows = export_rows([*CHOSEN, "gsm8k"], data_dir=folder, wrong=True)
    return folder, {row["source"]: row for row in rows}


@pytest.mark.parametrize("name", CHOSEN)
def test_right_and_wrong_together_are_what_lm_eval_asks(exported, name):
    folder, rows = exported
    [task] = load_tasks([name], data_dir=folder)["tasks"].values()
    task.build_all_requests(rank=0, world_size=1)
    told = [rows[name], *rows[name]["wrong"]]
    asked = [(one["prompt"], one["completion"]) for one in told]
    assert sorted(asked) == sorted(one.args for one in task.instances)
    likely = [(0.0 if one.args == asked[0] else -50.0, False) for one in task.instances]
    assert task.process_results(task.instances[0].doc, likely)["acc"] == 1


def test_choices_that_stand_in_the_prompt_have_prompts_of_their_own(exported):
    row = exported[1]["winogrande"]
    assert [one["prompt"] for one in row["wrong"]] == ["The cup beat the pan as the pan"]
    assert row["prompt"] == "The cup beat the pan as the cup"


def test_a_task_without_choices_has_no_wrong_answer(exported):
    assert "wrong" not in exported[1]["gsm8k"]


def question(prompt=(3, 4), right=(5,), wrong=((6,), (7, 8)), **more):
    pairs = [{"prompt": say(*prompt), "completion": f" {say(*one)}"} for one in (right, *wrong)]
    return {**pairs[0], "wrong": pairs[1:], "source": "task", **more}


def read(tmp_path, *rows, max_tokens=20, **source):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    notes = []
    found = read_questions(
        [Source(path=str(path), **source)],
        word_tokenizer(),
        max_tokens=max_tokens,
        note=notes.append,
    )
    return found, notes


def test_questions_are_read_as_tokens(tmp_path):
    plain = {"prompt": say(3), "completion": f" {say(9)}"}
    [one, other], notes = read(tmp_path, question(), plain)
    assert (one.right.prompt, one.right.answer, one.source) == ((3, 4), (5,), "task")
    assert [(w.prompt, w.answer) for w in one.wrong] == [((3, 4), (6,)), ((3, 4), (7, 8))]
    assert (other.wrong, notes) == ((), [])


def test_a_question_is_whole_or_left_out(tmp_path):
    rows = [question(), question(wrong=((6,) * 5,)), question(wrong=((),))]
    found, [note] = read(tmp_path, *rows, max_tokens=6)
    assert len(found) == 1
    assert "of 3 rows, 1 with more than 6 tokens, 1 with an empty prompt or answer left" in note
    with pytest.raises(DataError, match="no usable row from 0 to its end: 3 with more than 2"):
        read(tmp_path, *[question()] * 3, max_tokens=2)


@pytest.mark.parametrize("wrong", ["w3", [3], [{"prompt": "w3"}], {"prompt": "w3"}])
def test_wrong_answers_that_are_none_are_refused_in_one_line(tmp_path, wrong):
    with pytest.raises(DataError, match="line 2") as refused:
        read(tmp_path, question(), question() | {"wrong": wrong})
    assert "\n" not in str(refused.value)
