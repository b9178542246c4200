"""Tables of the tasks' questions: lm-eval words them, whose index takes seconds to make."""

import json

import pytest

from buddy.lab.commonsense import COMMONSENSE
from buddy.lab.paper.methods import ComparedMethod
from buddy.lab.paper.orders import STATIC
from buddy.lab.paper.published.read import read_paper
from buddy.lab.paper.tables.accuracy import _KINDS, _panels, _sheets
from buddy.lab.plots.read.points import read_execution, read_points
from tests.lab.paper.made import make, save_model


def test_the_heat_map_has_four_depths_of_eight_tasks(model, data, tmp_path):
    _, record, _ = make("heatmap", model, data, tmp_path / "out")
    entries = read_execution([record], "heatmap")
    # 5, 4, 4 and 3 of 6 blocks: two budgets round to one depth.
    assert len(entries) == 3 * 8
    for entry in entries:
        assert sum(entry.rates) == pytest.approx(entry.blocks)


def test_the_predictor_is_asked_for_every_prompt(model, data, tmp_path):
    _, record, _ = make("budgets", model, data, tmp_path / "out", rows=3)
    tasks = {task["task"]: task["blocks"] for task in record["results"]["tasks"]}
    assert tasks.keys() == {*COMMONSENSE, "gsm8k", "mmlu", "samsum", "alpaca"}
    assert {blocks for own in tasks.values() for blocks in own} <= set(range(3, 7))
    assert len({blocks for own in tasks.values() for blocks in own}) > 1, "it is random"
    for row in record["results"]["bars"]["rows"]:
        assert sum(row["values"]) == pytest.approx(100)


def test_each_method_stands_beside_the_papers_own(model, data, tmp_path, commands_here):
    own = (ComparedMethod(label="PuDDing", policy="random:7"),)
    collected, record, said = make("accuracy", model, data, tmp_path / "out", rows=1, methods=own)
    points = read_points([record], "accuracy")
    averages = {(point.label, point.blocks) for point in points if point.task == "average"}
    assert averages == {("Dense", 6), ("Dense, tuned", 6)} | {
        (label, blocks) for label in (*STATIC, "Random", "Buddy", "PuDDing") for blocks in (4, 3)
    }
    assert sum(line.startswith("buddy importance") for line in said) == 4
    assert sum(line.startswith("buddy eval tasks") for line in said) == 2
    average, by_task = collected.sheets
    beside = {(row[0], row[1]): row[5] for row in average.rows}
    assert beside["PuDDing", "4"] == "52.4"  # Llama-3-8B, 8 of 32 blocks removed
    assert beside["Buddy", "3"] == "48.1"
    assert beside["Random", "3"] == ""
    assert len(by_task.columns) == 10
    assert all(len(row) == 10 for row in by_task.rows)
    _, again, said = make("accuracy", model, data, tmp_path / "out", rows=1, methods=own)
    assert said == []
    assert again["results"] == record["results"]


def test_a_method_that_keeps_no_budget_has_a_row_whatever_each_task_ran():
    cells = [*COMMONSENSE.items(), ("average", "acc")]
    named = [{"task": task, "metric": metric, "num_blocks": 30} for task, metric in cells]
    dense = {"label": "Dense", "blocks": 30, "value": 0.5, "stderr": 0.1}
    free = [
        {"label": "D-LLM", "blocks": 20 + n, "mean_blocks": 20.1 + n, "value": 0.4, "stderr": 0.1}
        for n in range(len(cells))
    ]
    points = [item | dense for item in named]
    points += [item | ran for item, ran in zip(named, free, strict=True)]
    theirs = [row for row in read_paper("accuracy") if row["model"] == "Llama-2-7B"]
    whole, by_task = _sheets(points, {"D-LLM": "Dense"}, _KINDS["accuracy"], theirs, "Llama-2-7B")
    assert [row[:4] for row in whole.rows if row[0] == "D-LLM"] == [
        ("D-LLM", "28", "40.0 ± 10.0", "80.0")
    ]
    assert [row for row in by_task.rows if row[0] == "D-LLM"] == [("D-LLM", "28", *["40.0"] * 8)]


def test_a_method_that_keeps_no_budget_is_drawn_at_what_it_ran_though_that_rounds_to_full_depth():
    named = {"task": "average", "metric": "acc", "num_blocks": 30, "stderr": 0.1}
    points = [
        {"label": "Dense", "blocks": 30, "value": 0.5, **named},
        {"label": "SLEB", "blocks": 15, "value": 0.4, **named},
        {"label": "FiRST", "blocks": 30, "mean_blocks": 29.7, "value": 0.45, **named},
    ]
    theirs = [row for row in read_paper("accuracy") if row["model"] == "Llama-2-7B"]
    dense_of = {"SLEB": "Dense", "FiRST": "Dense, FiRST"}
    ours, _ = _panels(points, dense_of, _KINDS["accuracy"], theirs)
    assert [(line["label"], line["x"], line["y"]) for line in ours["lines"]] == [
        ("SLEB", [0, 50], [50, 40]),
        ("FiRST", [pytest.approx(1)], [45]),
    ]


def test_what_is_kept_is_of_the_same_weights_at_full_depth_and_says_its_error():
    def point(label, blocks, value):
        about = {"task": "gsm8k", "metric": "exact_match,flexible-extract", "num_blocks": 8}
        return {"label": label, "blocks": blocks, "value": value, "stderr": 0.02, **about}

    points = [
        point("Dense", 8, 0.4),
        point("SLEB", 6, 0.3),
        point("Dense, tuned", 8, 0.5),
        point("Buddy", 6, 0.4),
        point("Dense, PuDDing", 8, 0.8),
        point("PuDDing", 6, 0.4),
        point("FiRST", 7, 0.3),  # it keeps no budget, so its weights were not run at full depth
    ]
    dense_of = {
        "SLEB": "Dense",
        "Buddy": "Dense, tuned",
        "PuDDing": "Dense, PuDDing",
        "FiRST": "Dense, FiRST",
    }
    theirs = [row for row in read_paper("gsm8k") if row["model"] == "Llama-2-7B"]
    (sheet,) = _sheets(points, dense_of, _KINDS["gsm8k"], theirs, "Llama-2-7B")
    assert {row[0]: row[3] for row in sheet.rows} == {
        "Dense": "100.0",
        "SLEB": "75.0",
        "Dense, tuned": "100.0",
        "Buddy": "80.0",
        "Dense, PuDDing": "100.0",
        "PuDDing": "50.0",
        "FiRST": "75.0",
    }
    # The paper's share is of the dense model before tuning.
    assert {row[0]: row[4] for row in sheet.rows} == {
        "Dense": "100.0",
        "SLEB": "75.0",
        "Dense, tuned": "125.0",
        "Buddy": "100.0",
        "Dense, PuDDing": "200.0",
        "PuDDing": "100.0",
        "FiRST": "75.0",
    }
    assert sheet.rows[1][2] == "30.0 ± 2.0"
    begin = {
        line["label"]: line["y"][0]
        for line in _panels(points, dense_of, _KINDS["gsm8k"], theirs)[0]["lines"]
    }
    assert begin == {"SLEB": 40, "Buddy": 50, "PuDDing": 80, "FiRST": 30}


def test_retention_has_the_eight_tasks_mmlu_and_gsm8k(data, tmp_path, commands_here):
    model = save_model(tmp_path / "model")
    config = tmp_path / "model-base" / "config.json"
    values = json.loads(config.read_text()) | {
        "max_position_embeddings": 400
    }  # for GSM8K's answers
    config.write_text(json.dumps(values))
    collected, record, said = make("retention", model, data, tmp_path / "out", rows=1)
    assert sum(line.startswith("buddy eval") for line in said) == 6
    (sheet,) = collected.sheets
    rows = {row[0]: row for row in sheet.rows}
    assert list(rows) == [*COMMONSENSE, "average", "mmlu", "gsm8k"]
    points = {(p["task"], p["metric"], p.get("budget")): p for p in record["results"]["points"]}
    for task, kept in zip(rows, record["results"]["kept"], strict=True):
        assert kept["task"] == task
        if kept["value"] is None:  # a random model: full depth is never right
            assert rows[task][5] == "-"
            assert "no right answer of" in record["results"]["differs"][1]
            assert not any(name == task for name, *_ in points)
            continue
        whole, chosen = (points[task, kept["metric"], budget] for budget in (None, "auto"))
        assert kept["value"] == pytest.approx(chosen["value"] / whole["value"])
        assert kept["full_depth"] == whole["value"]
        assert rows[task][4] == f"{chosen['mean_blocks']:.1f}"
    assert any(kept["value"] is None for kept in record["results"]["kept"]), "GSM8K at least"
    assert any(kept["value"] is not None for kept in record["results"]["kept"])
    assert (tmp_path / "out" / "retention.png").exists()
    _, again, said = make("retention", model, data, tmp_path / "out", rows=1)
    assert said == []
    assert again["results"] == record["results"]
