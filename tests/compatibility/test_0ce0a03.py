"""What commit 0ce0a03 wrote is read as it was written, and its command lines are still understood.

The folder beside this file was made by that commit: a tiny checkpoint of each policy and method
with what it answered, the log and record of an evaluation, an importance record, and the table of
commands.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from typer.main import get_command

from buddy import BuddyForCausalLM
from buddy.cli.main import app

BEFORE = Path(__file__).with_name("0ce0a03")
EXPECTED = json.loads((BEFORE / "expected.json").read_text())
IDS = torch.tensor(EXPECTED["ids"])
MIXED = [0.5, "4 blocks", 1.0]
BUDGETS = {"full": 1.0, "mixed": MIXED, "auto": "auto", "mean": "mean:4 blocks"}


@pytest.mark.parametrize("name", EXPECTED["models"])
def test_a_checkpoint_loads_and_answers_as_it_did(name):
    expected = EXPECTED["models"][name]
    model = BuddyForCausalLM.from_pretrained(BEFORE / name, engine="general", dtype=torch.float32)
    assert (model.policy.name, model.kv_policy) == (expected["policy"], expected["kv_policy"])
    for key, answer in expected["says"].items():
        if "logits" in answer:
            with torch.no_grad():
                out = model(IDS, budget=BUDGETS[key])
            # atol: the order of sums is the processor's.
            assert_close(out.logits[:, -1], torch.tensor(answer["logits"]), atol=1e-4, rtol=1e-4)
            assert [list(blocks) for blocks in out.plan.executed_sets] == answer["blocks"]
        text = model.generate(IDS, budget=BUDGETS[key], max_new_tokens=6, do_sample=False)
        assert text[:, IDS.shape[1] :].tolist() == answer["tokens"]


def test_the_mixed_budgets_differ_from_full_depth():
    says = EXPECTED["models"]["routed"]["says"]
    assert len({json.dumps(says[key]["tokens"]) for key in ("full", "mixed", "auto")}) > 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    shutil.copytree(BEFORE, tmp_path / "before")
    monkeypatch.chdir(tmp_path / "before")
    return tmp_path / "before"


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        app([str(argument) for argument in arguments])
    return end.value.code


def test_an_evaluation_goes_on_from_its_log_and_gives_the_same_record(folder):
    log, record = folder / "answers.samples.jsonl", folder / "answers.json"
    lines, results = log.read_text().splitlines(), json.loads(record.read_text())
    record.unlink()
    budgets = ("1.0", "4 blocks", "mean:5 blocks", "prefill:1.0,decode:0.5")
    policies = ("routed", "random:1", "mine=static:3,1,4")
    chosen = [part for budget in budgets for part in ("-b", budget)]
    chosen += [part for policy in policies for part in ("--policy", policy)]
    assert run("eval", "answers", "rows.jsonl", "-m", "routed", *chosen, "--out", record) == 0
    now = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(line.pop("checksum") for line in now)  # which it did not have
    assert now == [json.loads(line) for line in lines]  # nothing was computed again
    again = json.loads(record.read_text())
    assert again["results"] == results["results"]
    for key in ("model", "kind"):
        assert again[key] == results[key]
    assert {**again["config"], "model": ""} == {**results["config"], "model": ""}


def test_an_importance_record_is_a_policy(folder):
    model = BuddyForCausalLM.from_pretrained(folder / "static", policy="static:cosine.json")
    order = json.loads((folder / "cosine.json").read_text())["results"]["removal_order"]
    with torch.no_grad():
        out = model(IDS[:1], budget="4 blocks")
    assert set(range(6)) - set(out.plan.executed_sets[0]) == set(order[:2])


def parameters(command):
    """Of each command, by its whole name, the parameters that it takes."""
    if hasattr(command, "commands"):
        return {
            f"{name} {rest}".strip(): found
            for name in command.list_commands(None)
            for rest, found in parameters(command.get_command(None, name)).items()
        }
    return {"": command.params}


def tables(node, name=""):
    for key, value in node.items():
        if value and all("opts" in entry for entry in value.values()):
            yield f"{name} {key}".strip(), value
        else:
            yield from tables(value, f"{name} {key}".strip())


NOW = parameters(get_command(app))
THEN = dict(tables(json.loads((BEFORE / "commands.json").read_text())))


@pytest.mark.parametrize("command", THEN)
def test_every_option_of_a_command_is_still_taken(command):
    now = {
        option: parameter
        for parameter in NOW[command]
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    positional = [
        parameter for parameter in NOW[command] if parameter.param_type_name == "argument"
    ]
    arguments = [then for then in THEN[command].values() if then["kind"] == "argument"]
    assert len(positional) >= len(arguments)
    required = [parameter for parameter in positional if parameter.required]
    assert len(required) <= sum(then["required"] for then in arguments)
    for then in THEN[command].values():
        if then["kind"] == "option":
            for option in then["opts"]:
                assert option in now, f"buddy {command} {option}"
                assert now[option].required <= then["required"]
                assert getattr(now[option], "multiple", False) == then["multiple"]


def test_the_table_of_commands_is_not_empty():
    assert {"generate", "eval answers", "train-budget", "models pull"} <= THEN.keys()
