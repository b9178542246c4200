"""`buddy train-budget` as it is typed, killed and taken up again."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.product.cli import forked
from tests.product.cli.test_cli import run
from tests.product.training.made import save_stage_1, write_recipe

STEPS = 40


@pytest.fixture
def folder(tmp_path):
    save_stage_1(tmp_path / "stage1")
    write_recipe(tmp_path, log__save_every=20)
    return tmp_path


def command(folder, out, *more):
    recipe = str(folder / "recipe.toml")
    return [
        "train-budget",
        recipe,
        "--out",
        str(folder / out),
        "--set",
        f"optim.steps={STEPS}",
        *more,
    ]


def test_killed_and_resumed_it_comes_to_the_same_end(folder):
    state = folder / "out/state.safetensors"
    killed = forked.run(command(folder, "out"), killed_at=state)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (folder / "out/checkpoint").exists()
    refused = run(*command(folder, "out"))
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    done = run(*command(folder, "out", "--resume"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(folder / "out/checkpoint")
    assert f"step {STEPS}" in done.stderr
    whole = run(*command(folder, "whole"))
    assert whole.returncode == 0, whole.stderr
    expected = load_file(folder / "whole/state.safetensors")
    for name, value in load_file(state).items():
        assert torch.equal(value, expected[name]), name
    answer = run("generate", "w3 w5", "-m", done.stdout.strip(), "--raw", "-b", "auto", "--json")
    assert answer.returncode == 0, answer.stderr
    assert 3 <= json.loads(answer.stdout)["budget_blocks"] <= 6


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--set", "grpo.lambda=1"], "unknown key lambda"),
        (["--set", "grpo.samples"], "--set takes KEY=VALUE"),
        (["--set", "model.name=nowhere/at/all"], "nowhere/at/all"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folder, more, says):
    done = run(*command(folder, "out", *more))
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
