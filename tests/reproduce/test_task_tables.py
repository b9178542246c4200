"""Tables of the tasks' questions: lm-eval words them, whose index takes seconds to make."""

import pytest

from buddy.data.commonsense import COMMONSENSE
from buddy.plots.read.points import read_execution, read_points
from buddy.reproduce.methods import Method
from buddy.reproduce.orders import STATIC
from tests.reproduce.made import make


def test_the_heat_map_has_four_depths_of_eight_tasks(model, data, tmp_path):
    _, record, _ = make("heatmap", model, data, tmp_path / "out")
    entries = read_execution([record], "heatmap")
    # 5, 4, 4 and 3 of 6 blocks: two budgets round to one depth.
    assert len(entries) == 3 * 8
    for one in entries:
        assert sum(one.rates) == pytest.approx(one.blocks)


def test_the_predictor_is_asked_for_every_prompt(model, data, tmp_path):
    _, record, _ = make("budgets", model, data, tmp_path / "out", rows=3)
    tasks = {one["task"]: one["blocks"] for one in record["results"]["tasks"]}
    assert tasks.keys() == {*COMMONSENSE, "gsm8k", "mmlu", "samsum", "alpaca"}
    assert {blocks for own in tasks.values() for blocks in own} <= set(range(3, 7))
    assert len({blocks for own in tasks.values() for blocks in own}) > 1, "it is random"
    for row in record["results"]["bars"]["rows"]:
        assert sum(row["values"]) == pytest.approx(100)


def test_each_method_stands_beside_the_papers_own(model, data, tmp_path, commands_here):
    own = (Method(label="PuDDing", policy="random:7"),)
    collected, record, said = make("accuracy", model, data, tmp_path / "out", rows=1, methods=own)
    points = read_points([record], "accuracy")
    averages = {(one.label, one.blocks) for one in points if one.task == "average"}
    assert averages == {("Dense", 6), ("Dense, tuned", 6)} | {
        (label, blocks) for label in (*STATIC, "Random", "Buddy", "PuDDing") for blocks in (4, 3)
    }
    assert sum(line.startswith("buddy importance") for line in said) == 4
    assert sum(line.startswith("buddy eval tasks") for line in said) == 2
    average, by_task = collected.sheets
    beside = {(row[0], row[1]): row[4] for row in average.rows}
    assert beside["PuDDing", "4"] == "52.4"  # Llama-3-8B, 8 of 32 blocks removed
    assert beside["Buddy", "3"] == "48.1"
    assert beside["Random", "3"] == ""
    assert len(by_task.columns) == 10
    assert all(len(row) == 10 for row in by_task.rows)
    _, again, said = make("accuracy", model, data, tmp_path / "out", rows=1, methods=own)
    assert said == []
    assert again["results"] == record["results"]
