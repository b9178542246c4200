"""A benchmark goes on from what is there only if that is what it would have made."""

import argparse
import math
import runpy
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from buddy import BuddyForCausalLM
from buddy.errors import ResultError
from buddy.lab import experiment
from buddy.lab.commonsense import metric_of
from buddy.lab.evaluation.samples import SampleLog
from buddy.lab.steps import trained_record
from buddy.records import RunRecord, read_record
from buddy.settings import read_recipe
from buddy.training.methods import read_method
from buddy.training.router.recipe import Recipe
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "ablations.toml"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as `python benchmarks/NAME.py` does
    return lambda name: runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))


def write(path, *, command="", config=None, results=None, model=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    record = RunRecord(
        kind="made", command=command, config=config or {}, results=results or {}, model=model
    )
    record.save(path)


def test_a_run_of_the_same_recipe_is_used_and_one_of_another_refused(script, tmp_path):
    trained = script("ablations")["trained"]
    recipe = read_recipe(Recipe, RECIPE, ["optim.steps=7"])
    write(
        tmp_path / "run" / "record.json",
        config={
            **asdict(recipe),
            "processes": 2,
            "measured_prior": {"source": "found"},
            "taught_by": None,
        },
        results={"evaluation": [1]},
    )
    assert trained(RECIPE, tmp_path / "run", ["optim.steps=7"])["results"]["evaluation"] == [1]
    with pytest.raises(
        ResultError, match=r"another recipe, with other optim\.steps \(was 7, is 8\): delete"
    ):
        trained(RECIPE, tmp_path / "run", ["optim.steps=8"])


def test_a_run_from_before_there_was_a_setting_had_its_default(tmp_path):
    recipe = read_recipe(Recipe, RECIPE)
    config = asdict(recipe)
    del config["teacher"], config["optim"]["average"]
    write(tmp_path / "run" / "record.json", config=config)
    assert trained_record(tmp_path / "run", recipe) == read_record(tmp_path / "run" / "record.json")
    averaged = replace(recipe, optim=replace(recipe.optim, average=0.5))
    with pytest.raises(ResultError, match=r"other optim\.average \(was 0\.0, is 0\.5\)"):
        trained_record(tmp_path / "run", averaged)
    del config["optim"]["steps"]
    write(tmp_path / "run" / "record.json", config=config)
    with pytest.raises(ResultError, match=r"other optim\.steps \(was null, is 60\)"):
        trained_record(tmp_path / "run", recipe)


def test_methods_are_compared_by_runs_of_the_recipe_alone(script, tmp_path, monkeypatch):
    recipe = read_recipe(Recipe, RECIPE, ["lora.keep_context=true", "lora.rank=3"])
    write(tmp_path / "buddy" / "record.json", config=asdict(recipe))
    arguments = ["compare", str(RECIPE), "--runs", str(tmp_path), "--only", "buddy"]
    arguments += ["--out", str(tmp_path / "out.json"), "--rows", "rows=none.jsonl:0:1"]
    monkeypatch.setattr("sys.argv", [*arguments, "--set", "lora.rank=5"])
    with pytest.raises(ResultError, match=r"other lora\.rank \(was 3, is 5\): delete"):
        script("compare_methods")["main"]()


def test_a_measurement_by_the_same_command_is_used_and_by_another_refused(script, tmp_path):
    module = script("compare_methods")
    sleb = module["ComparedMethod"]("sleb-4", "SLEB", Path("recipe.toml"), (), (4,))
    args = argparse.Namespace(runs=tmp_path, dtype=None)

    def measured(method, *command):
        return module["measured"](method, model, "tasks", args, *command)

    out, model = tmp_path / "sleb-4" / "tasks.json", tmp_path / "checkpoint"
    command = f"buddy eval tasks --limit 9 --model {model} --out {out} -b '4 blocks'"
    tiny_model().save_pretrained(model)
    facts = BuddyForCausalLM.from_pretrained(model).facts()
    write(out, command=command, results={"points": [{"value": 1}]}, model=facts)
    [point] = measured(sleb, "tasks", "--limit", 9)
    assert point == {"value": 1, "label": "SLEB", "policy": "sleb"}
    with pytest.raises(ResultError, match=r"--limit 9 .* and not .*--limit 8 .*: delete"):
        measured(sleb, "tasks", "--limit", 8)
    with pytest.raises(ResultError, match="another command"):
        measured(replace(sleb, depths=(4, 3)), "tasks", "--limit", 9)
    args.dtype = "float32"
    with pytest.raises(ResultError, match=r"and not .*--dtype float32.*: delete"):
        measured(sleb, "tasks", "--limit", 9)
    args.dtype = None
    write(out, command=command, model={**facts, "adapter": "a"})
    with pytest.raises(ResultError, match=r"tasks.json is of another model, with other adapter"):
        measured(sleb, "tasks", "--limit", 9)


def test_how_far_a_method_is_from_buddy_is_taken_row_by_row(script, tmp_path):
    module = script("compare_methods")
    above_buddy, method = module["answers_above_buddy"], module["ComparedMethod"]
    losses = {"buddy": {"a": 2.0, "b": 3.0, "c": 9.0}, "sleb-4": {"a": 4.0, "b": 9.0}}
    # A gate's threshold for 4 blocks on average, at no budget, and its own.
    labels = {"buddy": ["buddy"], "sleb-4": ["sleb-4"], "first": ["own", "4"]}
    losses["first"] = losses["sleb-4"]
    for name, rows in losses.items():
        (tmp_path / name).mkdir()
        with SampleLog(tmp_path / name / "answers-mine.samples.jsonl", {}) as log:
            for label in labels[name]:
                blocks = 6 if name == "first" else 4
                key = f"k-{label}"
                log.declare({"label": label, "blocks": blocks, "num_blocks": 6, "key": key})
                for row, nll in rows.items():
                    log.add(f"{key} {row}", task="t", nll=nll, tokens=2, blocks=[0, 1, 2, 5])
    gaps = [1.0, 3.0]
    sleb = method("sleb-4", "SLEB", Path("recipe.toml"), (), (4,))
    first = method("first", "FiRST", Path("recipe.toml"), (), (4,), is_online=True)
    for other in (sleb, first):
        [point] = above_buddy("mine", other, tmp_path)
        assert point["difference"] == statistics.fmean(gaps)
        assert point["stderr"] == pytest.approx(statistics.stdev(gaps) / 2**0.5)
        assert (point["label"], point["blocks"], point["rows"]) == (other.label, 4, 2)
    assert above_buddy("mine", replace(sleb, depths=(3,)), tmp_path) == []


def test_how_much_more_often_a_method_is_right_counts_each_task_alike(script, tmp_path):
    module = script("compare_methods")
    right = {"buddy": {"piqa": [0, 0, 1], "social_iqa": [1, 0]}}
    right["sleb-4"] = {"piqa": [1, 1, 1], "social_iqa": [0, 0]}
    right["buddy"]["gsm8k"], right["sleb-4"]["gsm8k"] = [0, 1, 0], [1, 1, 1]
    for name, tasks in right.items():
        (tmp_path / name).mkdir()
        with SampleLog(tmp_path / name / "tasks.samples.jsonl", {}) as log:
            log.declare({"label": name, "blocks": 4, "num_blocks": 6, "key": name})
            for task, scores in tasks.items():
                for number, score in enumerate(scores):
                    # The task's metric counts, and no other.
                    found = {metric_of(task): score, "f1": 9.0}
                    key = f"{name} {task} {number}"
                    log.add(key, task=task, doc_id=number, scores=found)
    sleb = module["ComparedMethod"]("sleb-4", "SLEB", Path("recipe.toml"), (), (4,))
    *tasks, point = module["accuracy_above_buddy"](sleb, tmp_path)
    assert {own["task"]: own["difference"] for own in tasks} == {
        "piqa": pytest.approx(2 / 3),
        "social_iqa": -0.5,
        "gsm8k": pytest.approx(2 / 3),  # no part of the average
    }
    assert point["difference"] == pytest.approx((2 / 3 - 1 / 2) / 2)
    errors = [statistics.stdev([1, 1, 0]) / 3**0.5, statistics.stdev([-1, 0]) / 2**0.5]
    assert point["stderr"] == pytest.approx(math.hypot(*errors) / 2)
    assert (point["task"], point["label"], point["rows"]) == ("average", "SLEB", 8)


def test_every_method_has_a_recipe_and_pudding_one_with_adapters(script, tmp_path):
    base = tmp_path / "base"
    tiny_model().save_pretrained(base)
    module = script("compare_methods")
    sets = [f"model.name={base}", "model.dtype=float32", "optim.steps=3"]
    args = argparse.Namespace(
        recipe=ROOT / "recipes" / "comparison.toml",
        runs=tmp_path / "runs",
        depths="5,4",
        orders="results/importance",
        set=sets,
    )
    found = {method.name: method for method in module["methods"](args)}
    read = {
        name: read_method(method.recipe, method.changes)[1]
        for name, method in found.items()
        if method.recipe is not None and name not in module["RIVALS"]
    }
    assert found.keys() - read.keys() == {"untuned", *module["RIVALS"]}
    assert read["pudding_base"].model.name == str(base)
    tuned = read["pudding_lora"]
    assert tuned.model.name == str(tmp_path / "runs/pudding_base/checkpoint")
    assert (tuned.router.policy, tuned.router.orders, tuned.lora.keep_context) == (
        "pudding",
        (),
        True,
    )
    # As much training as any other model for all depths.
    assert tuned.optim == read["random"].optim
    assert tuned.budget == read["random"].budget
    assert tuned.data == read["random"].data
    assert "pudding_lora" in script("method_speed")["METHODS"]


def test_a_script_ends_with_one_line_where_it_refuses_something(capsys):
    def refusing():
        raise ResultError("it is of another recipe")

    with pytest.raises(SystemExit, match=r"^it is of another recipe$"):
        experiment.run(refusing)


def test_subjects_take_turns_and_the_first_round_does_not_count():
    asked = []

    def measure(name, case):
        asked.append((name, case))
        return len(asked)

    seen = experiment.take_turns(["a", "b"], [1, 8], 5, measure)
    assert {case: len(rounds) for case, rounds in seen.items()} == {1: 5, 8: 5}
    assert sorted(asked) == sorted([(name, case) for name in "ab" for case in (1, 8)] * 6)
    assert min(value for rounds in seen.values() for made in rounds for value in made.values()) == 5
    assert {tuple(made) for rounds in seen.values() for made in rounds} == {("a", "b"), ("b", "a")}
