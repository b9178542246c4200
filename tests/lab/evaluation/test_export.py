"""Training rows of tasks are worded as lm-eval words its questions, answered right."""

import pytest

from buddy.errors import DataError
from buddy.lab.evaluation.local_tasks import LOCAL_TASKS
from buddy.lab.evaluation.rouge.samsum import INSTRUCTION
from buddy.lab.evaluation.tasks.export import export_rows
from buddy.lab.evaluation.tasks.loading import load_tasks, load_training
from tests.lab.evaluation.task_rows import ROWS, write

DATA = {name: row for name, row in ROWS.items() if LOCAL_TASKS[name].shots == "train"}
WORDED = {
    "arc_easy": ("Question: Which falls?\nAnswer:", " a stone"),
    "boolq": ("It is so.\nQuestion: is it so?\nAnswer:", " yes"),
    "gsm8k": ("Question: What is 2 + 3?\nAnswer:", f" {DATA['gsm8k']['answer']}"),
    "hellaswag": ("Cooking: A man stirs. Then he", " tastes it."),
    "openbookqa": ("The sun is", " hot"),
    "piqa": ("Question: Open a tin.\nAnswer:", " Use an opener."),
    "social_iqa": ("Q: Ann fell. How is she?\nA:", " hurt"),
    "winogrande": ("The cup beat the pan as the cup", " was light."),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """One row of each task, and the folder with them as training and as evaluation data."""
    folder = tmp_path_factory.mktemp("data")
    for name, row in DATA.items():
        write(folder, name, [row])
        write(folder, name, [row], LOCAL_TASKS[name].split)
    return folder, {row["source"]: row for row in export_rows(list(DATA), data_dir=folder)}


@pytest.mark.parametrize("name", DATA)
def test_a_row_is_worded_as_the_task_words_it(exported, name):
    _, rows = exported
    assert rows[name] == dict(zip(("prompt", "completion"), WORDED[name], strict=True), source=name)


@pytest.mark.parametrize("name", sorted(set(DATA) - {"gsm8k"}))
def test_and_as_lm_eval_asks_it_in_an_evaluation(exported, name):
    """The same row as evaluation data: one of lm-eval's own requests, and the one it counts."""
    folder, rows = exported
    asked = (rows[name]["prompt"], rows[name]["completion"])
    [task] = load_tasks([name], data_dir=folder)["tasks"].values()
    task.build_all_requests(rank=0, world_size=1)
    assert [instance.args for instance in task.instances].count(asked) == 1
    # What lm-eval makes of a model to which only this answer is likely.
    likely = [(0.0 if instance.args == asked else -50.0, False) for instance in task.instances]
    assert task.process_results(task.instances[0].doc, likely)["acc"] == 1


def test_blanks_that_end_a_prompt_begin_the_continuation(tmp_path):
    write(tmp_path, "winogrande", [DATA["winogrande"] | {"option2": "cup "}])
    [row] = export_rows(["winogrande"], data_dir=tmp_path)
    assert row["prompt"].endswith("cup")
    assert row["completion"] == "  was light."


def test_samsum_is_asked_as_a_chat(tmp_path):
    write(tmp_path, "samsum", [{"id": "1", "dialogue": "A: hi", "summary": "A greets. "}])
    assert export_rows(["samsum"], data_dir=tmp_path) == [
        {"instruction": f"{INSTRUCTION}\n\nA: hi", "output": "A greets.", "source": "samsum"}
    ]


def test_rows_are_drawn_and_mixed_by_the_seed(tmp_path):
    piqa = [DATA["piqa"] | {"goal": f"goal {n}"} for n in range(9)]
    write(tmp_path, "piqa", piqa)
    write(tmp_path, "boolq", [DATA["boolq"] | {"question": f"q {n}"} for n in range(3)])
    told = []

    def draw(seed=0, limit=5):
        return export_rows(
            ["piqa", "boolq"],
            data_dir=tmp_path,
            limit=limit,
            seed=seed,
            on_task=lambda *news: told.append(news),
        )

    rows = draw()
    assert told == [("piqa", 5), ("boolq", 3)]
    assert len({row["prompt"] for row in rows}) == 8
    assert rows == draw()
    assert {row["prompt"] for row in rows} != {row["prompt"] for row in draw(seed=1)}
    sources = [row["source"] for row in rows]
    assert sources not in (sorted(sources), sorted(sources, reverse=True))
    every = {row["prompt"] for row in draw(limit=None)}
    assert {f"Question: goal {n}\nAnswer:" for n in range(9)} < every


def test_questions_of_other_rows_are_left_out(tmp_path):
    write(tmp_path, "piqa", [DATA["piqa"] | {"goal": f"goal {n}"} for n in range(9)])
    dialogues = [{"id": str(n), "dialogue": f"A: {n}", "summary": "Hi."} for n in range(9)]
    write(tmp_path, "samsum", dialogues)
    told = []
    seen = export_rows(["piqa", "samsum"], data_dir=tmp_path, limit=5)
    fresh = export_rows(
        ["piqa", "samsum"],
        data_dir=tmp_path,
        without=[*(row | {"source": "elsewhere"} for row in seen), {"prompt": ["no", "text"]}],
        on_task=lambda *news: told.append(news),
    )
    asked = [row.get("prompt", row.get("instruction")) for row in [*seen, *fresh]]
    assert len(set(asked)) == len(asked) == 18
    assert told == [("piqa", 4), ("samsum", 4)]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["mmlu"], "mmlu has no training rows: expected one of arc_challenge.*, samsum$"),
        (["lambada_openai"], "has no training rows"),
        (
            ["pika"],
            "no local data for task 'pika': --data-dir serves (?!.*mmlu).*, samsum; leave it out",
        ),
        (["boolq"], r"train\.jsonl cannot be read"),
        (["samsum"], r"train\.jsonl cannot be read"),
        (["piqa", "piqa"], "named twice: piqa"),
        ([], "none named"),
    ],
)
def test_what_cannot_be_had_is_refused(tmp_path, names, says):
    write(tmp_path, "piqa", [DATA["piqa"]])
    with pytest.raises(DataError, match=says):
        export_rows(names, data_dir=tmp_path)


def test_no_evaluation_rows_are_read(tmp_path):
    write(tmp_path, "piqa", [DATA["piqa"]])
    write(tmp_path, "piqa", [DATA["piqa"] | {"goal": "Not this one."}], "validation")
    [task] = load_training(["piqa"], data_dir=tmp_path).values()
    assert [doc["goal"] for doc in task.training_docs()] == ["Open a tin."]
    assert set(task.dataset) == {"train"}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_lm_eval_can_ask_are_taken_whatever_else_they_hold(tmp_path, name):
    text = next(field for field in LOCAL_TASKS[name].fields if field not in ("choices", "subject"))
    rows = [
        ROWS[name] | {text: f"w{n} {ROWS[name][text]}", "id": item, "more": more}
        for n, (item, more) in enumerate([(1, "a"), ("a", [1]), (None, {})])
    ]
    for split in {LOCAL_TASKS[name].split, LOCAL_TASKS[name].shots or "test"}:
        write(tmp_path, name, rows, split)
    for task in load_tasks([name], data_dir=tmp_path, fewshot=1)["tasks"].values():
        assert len(task.eval_docs) == 3
        task.set_fewshot_seed(seed=1)
        task.build_all_requests(rank=0, world_size=1)


def test_too_few_examples_and_unknown_subjects_are_refused(tmp_path):
    write(tmp_path, "gsm8k", [ROWS["gsm8k"]] * 2)
    write(tmp_path, "gsm8k", [ROWS["gsm8k"]] * 2, "test")
    with pytest.raises(DataError, match="gsm8k has 2 other rows for examples"):
        load_tasks(["gsm8k"], data_dir=tmp_path)
    for split in ("validation", "train"):
        write(tmp_path, "boolq", [ROWS["boolq"]] * 3, split)
    with pytest.raises(DataError, match="boolq has 0 other rows for examples"):
        load_tasks(["boolq"], data_dir=tmp_path, fewshot=1)
    for split in ("test", "dev"):
        write(tmp_path, "mmlu", [ROWS["mmlu"] | {"subject": "spells"}], split)
    with pytest.raises(DataError, match="mmlu has no subject 'spells'"):
        load_tasks(["mmlu"], data_dir=tmp_path)
