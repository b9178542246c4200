"""Training that 0ce0a03 began goes on: its states, tables and targets are read as they were.

The files in `before/` were made by that commit, run on this folder's model and rows and stopped
after half of the steps; `identities.json` has what it took for the identity of each kind of run.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from buddy.cli.main import app
from tests.product.training.made import examples, write_rows
from tests.tiny import tiny_buddy, tiny_model
from tests.words import say, word_tokenizer

BEFORE = Path(__file__).parent / "before"
MODEL = 'model.name = "{name}"\nmodel.dtype = "float32"\ndata.max_tokens = 40\n'
ROWS = '[[data.train]]\npath = "{0}"\n[[data.validation]]\npath = "v{0}"\n'
OPTIM = "[optim]\nsteps = 6\nbatch_size = 4\nlearning_rate = 1e-2\n{0}\n"
LOG = "[log]\nsave_every = 3\ntensorboard = false\n{0}\n"
STAGE_1 = "[lora]\nrank = 1\n"


def joint(head="", router="", budget="", optim="", more="", log=""):
    text = head + MODEL.format(name="base") + ROWS.format("rows.jsonl") + STAGE_1
    text += f'[router]\nprior = "none"\nrank = 2\n{router}\n' if router is not None else ""
    text += f"[budget]\n{budget}\n" if budget else ""
    return text + OPTIM.format(f"warmup_steps = 2\n{optim}") + LOG.format(log) + more


BUDGETS = 'evaluate_budgets = ["4 blocks"]'
RECIPES = {
    "plain": joint(log=BUDGETS),
    "full": joint(
        router='relaxation = "gumbel"\nsecond_route = 0.5\nspread = 0.1',
        budget="full_prompts = 0.7\nmixed_answers = 0.5\nstretch = 2\ncurriculum_steps = 4",
        optim='average = 0.9\nloss = "example"\nprompt_loss = 0.3\nschedule = "constant"',
        more='[teacher]\nname = "base"\nshare = 0.7\n',
        log=BUDGETS,
    ),
    "policy-gradient": joint(router='method = "policy-gradient"', log=BUDGETS),
    "static": joint(router='policy = "static:3,2,4,1"', log=BUDGETS),
    "layerskip": joint('method = "layerskip"\n', router=None, log=BUDGETS),
    "first": joint(
        'method = "first"\n', router=None, more="[gates]\npenalty = 0.5\ngate_steps = 0.5\n"
    ),
    "d-llm": joint('method = "d-llm"\n', router=None, more="[gates]\npenalty = 1.0\nwidth = 4\n"),
    "pudding": 'method = "pudding"\n'
    + MODEL.format(name="base")
    + ROWS.format("questions.jsonl")
    + '[sets]\nrounds = 1\nitems = 2\nlosses = ["likelihood"]\n[classifier]\nhidden = 2\n'
    + '[targets]\ndepths = ["4 blocks"]\n[optim]\nepochs = 3\nbatch_size = 4\n'
    + LOG.format("every = 2"),
    "predictor": MODEL.format(name="stage1")
    + ROWS.format("rows.jsonl")
    + "[predictor]\nrank = 2\n"
    + OPTIM.format("")
    + LOG.format(""),
}
RESUMED = ("plain", "pudding", "predictor")
TABLES = {
    "plain": (),
    "pudding": ("train-targets.safetensors", "validation-targets.safetensors"),
    "predictor": ("train-losses.safetensors", "validation-losses.safetensors"),
}


def write_questions(path, count, seed):
    lines = [
        json.dumps(
            {
                "prompt": say(*one.prompt),
                "completion": f" {say(*one.answer)}",
                "wrong": [{"prompt": say(*one.prompt), "completion": f" {say(*one.answer[::-1])}"}],
            }
        )
        for one in examples(count, seed=seed)
    ]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("before")
    tiny_model("llama").save_pretrained(path / "base")
    word_tokenizer().save_pretrained(path / "base")
    tiny_buddy("qwen3").save_pretrained(path / "stage1", tokenizer=word_tokenizer())
    write_rows(path / "rows.jsonl", 16)
    write_rows(path / "vrows.jsonl", 6, seed=1)
    write_questions(path / "questions.jsonl", 8, 2)
    write_questions(path / "vquestions.jsonl", 4, 3)
    for name, text in RECIPES.items():
        (path / f"{name}.toml").write_text(text)
    return path


def train(name, out, *more):
    command = "train-budget" if name == "predictor" else "train"
    done = CliRunner().invoke(app, [command, f"{name}.toml", "--out", str(out), *more])
    assert done.exit_code == 0, (done.stderr, done.exception)
    return out / "state.safetensors"


def identity(path):
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["buddy"])["identity"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_has_the_identity_that_it_had(folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(folder)
    before = json.loads((BEFORE / "identities.json").read_text())
    assert identity(train(name, tmp_path)) == before[name]


def test_a_run_goes_on_in_other_parts_to_the_same_end(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    out = tmp_path / "out"
    shutil.copytree(BEFORE / "plain", out)
    how = ("--set", "optim.micro_batch_tokens=40", "--set", "optim.activation_checkpointing=true")
    resumed = load_file(train("plain", out, "--resume", *how))
    whole = load_file(train("plain", tmp_path / "whole"))
    for key, value in whole.items():
        torch.testing.assert_close(resumed[key], value, atol=1e-4, rtol=1e-3, msg=key)


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_was_stopped_goes_on_to_the_same_end(folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(folder)
    out = tmp_path / "out"
    shutil.copytree(BEFORE / name, out)
    measured = {table: (out / table).stat().st_mtime_ns for table in TABLES[name]}
    resumed = load_file(train(name, out, "--resume"))
    lines = (out / "log.jsonl").read_text().splitlines()
    assert all(json.loads(line)["step"] > 3 for line in lines)
    whole = load_file(train(name, tmp_path / "whole"))
    assert resumed.keys() == whole.keys()
    for key, value in whole.items():  # the first half was of another processor, which rounds apart
        apart = (value.double() - resumed[key].double()).abs().max()
        assert apart <= 1e-3 * value.double().abs().max(), key
    if name == "predictor":  # a table that is whole is not measured again
        assert {table: (out / table).stat().st_mtime_ns for table in measured} == measured
