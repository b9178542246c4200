"""Several processes of one launch: each command shares its work or refuses them."""

import pytest
from accelerate.state import AcceleratorState
from typer.testing import CliRunner

from buddy.cli.main import app
from buddy.errors import BuddyError, TrainingError
from buddy.lab import lm_eval
from buddy.training.methods import read_method
from buddy.training.router.run import train
from tests.product.cli.test_train import RECIPE


@pytest.fixture
def two(monkeypatch):
    """This process is the first of two."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(folder=tmp_path))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    return path


@pytest.mark.parametrize("command", ["bench", "observe", "serve", "route"])
def test_work_for_one_process_is_refused_by_the_first_of_two(command, two):
    done = CliRunner().invoke(app, [command])
    assert isinstance(done.exception, BuddyError)
    assert f"buddy {command} is work for one process, and 2 were launched" in str(done.exception)


def test_the_others_say_nothing_again(two, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    done = CliRunner().invoke(app, ["bench"])
    assert (done.exit_code, done.output) == (2, "")


def test_lm_evals_own_command_refuses_several_processes(two):
    with pytest.raises(SystemExit, match="lm-eval's own command is work for one process, and 2"):
        lm_eval.main()


def test_a_number_without_a_rank_is_no_launch(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert CliRunner().invoke(app, ["info", "--help"]).exit_code == 0


def test_a_stage_that_shares_nothing_refuses_processes(two, recipe, tmp_path):
    rows = f'[data]\ntrain = [{{ path = "{tmp_path}/rows.jsonl" }}]\n[search]\nrows = 8\n'
    recipe.write_text(f'[model]\nname = "{tmp_path}"\n{rows}')
    method, settings = read_method(recipe)
    with pytest.raises(BuddyError, match="work for one process"):
        method.load("train")(settings, tmp_path / "out")


@pytest.mark.parametrize(
    ("variable", "value", "setting"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "mixed_precision bf16"),
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER", "dynamo_backend EAGER"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "gradient_accumulation_steps 4"),
    ],
)
def test_what_accelerate_is_set_to_and_a_run_is_not_is_refused(
    variable, value, setting, recipe, tmp_path, monkeypatch
):
    monkeypatch.setenv(variable, value)
    AcceleratorState._reset_state(True)
    try:
        with pytest.raises(TrainingError, match=setting):
            train(read_method(recipe)[1], tmp_path / "out")
    finally:
        AcceleratorState._reset_state(True)
    assert not (tmp_path / "out").exists()
