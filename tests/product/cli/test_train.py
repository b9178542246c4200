"""`buddy train` with a tiny model: a run, a kill, resuming, several processes, what is refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.checkpoint.card import read_card
from buddy.cli.main import app
from buddy.data.examples import Source, read_all
from buddy.errors import DataError, ModelError, RecipeError, TrainingError
from buddy.records import RunRecord
from buddy.settings import read_recipe
from buddy.training.router.evaluate import evaluate
from buddy.training.router.recipe import Recipe
from buddy.training.router.run import train
from buddy.training.run import Run, RunListener
from tests.product.cli import forked
from tests.product.cli.launched import run_two
from tests.product.training.examples import random_examples
from tests.tiny import tiny_model
from tests.words import say, word_tokenizer

RECIPE = """
[model]
name = "{folder}"
dtype = "float32"
[data]
train = [{{ path = "{folder}/rows.jsonl", template = "alpaca", stop = 40 }}]
validation = [{{ path = "{folder}/rows.jsonl", template = "alpaca", start = 40 }}]
max_tokens = 60
[lora]
rank = 2
[router]
prior = "none"
relaxation = "scaled-softmax"
[optim]
steps = 12
batch_size = 4
warmup_steps = 2
learning_rate = 1e-2
[log]
every = 2
save_every = 3
evaluate_every = 6
evaluate_rows = 8
evaluate_budgets = ["1.0", "4 blocks"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    rows = [
        {"instruction": say(*example.prompt), "output": say(*example.answer)}
        for example in random_examples(48)
    ]
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "recipe.toml").write_text(RECIPE.format(folder=path))
    return path


def arguments(folder, out, *changes, resume=False):
    sets = [part for change in changes for part in ("--set", change)]
    return [
        *["train", str(folder / "recipe.toml"), "--out", str(out), *sets],
        *(["--resume"] if resume else []),
    ]


def run(folder, out, *changes, resume=False):
    done = CliRunner().invoke(app, arguments(folder, out, *changes, resume=resume))
    assert done.exit_code == 0, (done.stderr, done.exception)
    return done


def test_plan_memory_tells_what_a_step_needs_and_runs_nothing(folder, tmp_path):
    out = tmp_path / "out"
    command = [*arguments(folder, out), "--plan-memory"]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0, told.stderr
    assert "frozen, in float32" in told.stdout
    assert "6 blocks" in told.stdout
    assert not out.exists()
    ledger = Path(__file__).parents[3] / "recipes" / "smollm2-135m-ledger.toml"
    other = CliRunner().invoke(app, ["train", str(ledger), "--plan-memory"])
    assert "of method buddy alone" in str(other.exception)


def trained(out):
    return load_file(out / "state.safetensors")


def log(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    return out, run(folder, out)


def test_a_run_leaves_a_checkpoint_logs_and_a_record(whole):
    out, done = whole
    assert done.stdout == f"{out / 'checkpoint'}\n"
    for words in ("12/12", "tokens/s", "cross-entropy by blocks", "distinct plans"):
        assert words in done.stderr
    lines = log(out)
    assert [line["step"] for line in lines if line["kind"] == "train"] == [2, 4, 6, 8, 10, 12]
    last = [line for line in lines if line["kind"] == "train"][-1]
    assert last["rows"] == 8
    assert len(last["execution"]) == 6
    assert last["execution"]["0"] == last["execution"]["5"] == 1.0
    assert last["router_grad_norm"] > 0
    assert {line["step"] for line in lines if line["kind"] == "evaluation/4"} == {6, 12}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(out / "tensorboard")).Reload()
    assert [scalar.step for scalar in seen.Scalars("train/loss")] == [2, 4, 6, 8, 10, 12]
    found = [scalar.value for scalar in seen.Scalars("train/execution/0")]
    assert found == [1.0] * 6
    record = json.loads((out / "record.json").read_text())
    assert record["kind"] == "training"
    assert record["results"]["steps"] == 12
    assert record["model"] == BuddyForCausalLM.from_pretrained(out / "checkpoint").facts()
    assert [entry["blocks"] for entry in record["results"]["evaluation"]] == [6, 4]


def test_the_card_of_a_run_names_base_data_and_losses(whole):
    card = read_card(whole[0] / "checkpoint")
    record = json.loads((whole[0] / "record.json").read_text())
    assert card.facts["base_model"] == record["config"]["model"]["name"]
    assert card.facts["license"] == "unknown"  # who publishes it has to say
    assert record["config"]["data"]["train"][0]["path"] in card.text
    for entry in record["results"]["evaluation"]:
        assert f"| {entry['blocks']} | {entry['cross_entropy']:.3f} |" in card.text


def test_the_checkpoint_routes_as_the_trained_model_did(folder, whole):
    model = BuddyForCausalLM.from_pretrained(whole[0] / "checkpoint")
    state = trained(whole[0])
    weights = dict(model.router.named_parameters())
    assert torch.equal(weights["decision.up.weight"], state["parameter.router.decision.up.weight"])
    assert state["parameter.router.decision.up.weight"].abs().max() > 0
    assert model.policy.name == "routed"
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        adapted = model(ids, budget="4 blocks")
        base = BuddyForCausalLM.from_pretrained(folder)(ids)
    assert adapted.executed_blocks.tolist() == [4]
    assert not torch.allclose(model(ids).logits, base.logits, atol=1e-3)


def test_killed_at_any_moment_and_resumed_it_ends_the_same(folder, whole, tmp_path):
    state = tmp_path / "state.safetensors"
    killed = forked.run(arguments(folder, tmp_path), killed_at=state)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run(folder, tmp_path, resume=True)
    expected = trained(whole[0])
    found = trained(tmp_path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    told = [
        [
            {name: value for name, value in line.items() if name != "tokens_per_s"}
            for line in log(out)
        ]
        for out in (tmp_path, whole[0])
    ]
    assert told[0] == told[1]
    assert evaluation(tmp_path) == evaluation(whole[0])


def evaluation(out):
    return json.loads((out / "record.json").read_text())["results"]["evaluation"]


@pytest.mark.parametrize("is_old", [False, True])
def test_a_finished_run_that_is_resumed_keeps_its_evaluation(folder, whole, tmp_path, is_old):
    out = tmp_path / "run"
    shutil.copytree(whole[0], out)
    if is_old:  # as states were written that held no evaluation
        with safe_open(out / "state.safetensors", framework="pt") as file:
            about = json.loads(file.metadata()["buddy"])
        del about["extra"]["evaluation"], about["extra"]["plans"]
        save_file(trained(out), out / "state.safetensors", {"buddy": json.dumps(about)})
    run(folder, out, resume=True)
    assert evaluation(out) == evaluation(whole[0])
    cards = [read_card(run / "checkpoint").text for run in (out, whole[0])]
    assert cards[0] == cards[1]


def test_under_a_constant_rate_a_run_is_made_longer_until_its_rate_falls(folder, tmp_path):
    constant = ("optim.schedule='constant'", "log.evaluate_every=0")
    falling = (*constant, "optim.steps=8", "optim.decay_steps=3")
    run(folder, tmp_path / "longer", *constant, "optim.steps=4")
    run(folder, tmp_path / "longer", *falling, resume=True)
    run(folder, tmp_path / "whole", *falling)
    expected, found = trained(tmp_path / "whole"), trained(tmp_path / "longer")
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    for changed, why in (
        ("optim.steps=9", "8 steps, 3 of them at a falling rate, and cannot become a run of 9"),
        ("optim.seed=1", "another run, with other optim.seed"),
    ):
        command = arguments(folder, tmp_path / "longer", *falling, changed, resume=True)
        refused = CliRunner().invoke(app, command)
        assert isinstance(refused.exception, TrainingError)
        assert why in str(refused.exception)


def test_a_run_saves_the_mean_of_its_weights_and_goes_on_with_both(folder, tmp_path):
    constant = ("optim.schedule='constant'", "log.evaluate_every=0", "optim.average=0.7")
    run(folder, tmp_path / "parts", *constant, "optim.steps=4")
    run(folder, tmp_path / "parts", *constant, "optim.steps=8", resume=True)
    run(folder, tmp_path / "whole", *constant, "optim.steps=8")
    expected, found = trained(tmp_path / "whole"), trained(tmp_path / "parts")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    name = "router.decision.up.weight"
    saved = BuddyForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint").router
    assert torch.equal(saved.decision.up.weight, expected[f"parameter.mean.{name}"])
    assert not torch.equal(saved.decision.up.weight, expected[f"parameter.{name}"])
    model = BuddyForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint")
    logged = [line for line in log(tmp_path / "whole") if line["kind"] == "evaluation/4"][-1]
    rows = Source(path=str(folder / "rows.jsonl"), template="alpaca", start=40)
    examples = read_all((rows,), load_tokenizer(str(folder)), max_tokens=60)
    assert logged["cross_entropy"] == pytest.approx(
        evaluate(model, examples, [4])[0][0].cross_entropy, rel=1e-6
    )


def test_a_router_of_standardised_inputs_goes_on_as_it_learns_and_is_saved_folded(folder, tmp_path):
    settings = ("router.standardise=true", "optim.average=0.7", "log.tensorboard=false")
    settings += ("optim.steps=5", "log.evaluate_every=0")

    def stop(step, numbers):
        if step == 4:
            raise KeyboardInterrupt

    recipe = read_recipe(Recipe, folder / "recipe.toml", settings)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "parts", listener=RunListener(stepped=stop))
    outs = [tmp_path / "whole", tmp_path / "parts"]
    for out in outs:
        train(recipe, out, resume=True)
    expected, found = map(trained, outs)
    assert found.keys() == expected.keys() >= {"parameter.standard.mean"}
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert evaluation(outs[0]) == evaluation(outs[1])
    model = BuddyForCausalLM.from_pretrained(outs[0] / "checkpoint")
    name, layer = "parameter.mean.router.decision.down", model.router.decision.down
    mean, deviation = (expected[f"parameter.standard.{one}"] for one in ("mean", "deviation"))
    assert torch.equal(layer.weight, expected[f"{name}.weight"] / deviation)
    bias = expected[f"{name}.bias"] - layer.weight @ mean
    torch.testing.assert_close(layer.bias, bias, atol=1e-4, rtol=1e-4)  # sums in another order
    rows = Source(path=str(folder / "rows.jsonl"), template="alpaca", start=40)
    examples = read_all((rows,), load_tokenizer(str(folder)), max_tokens=60)
    assert evaluation(outs[0])[1]["cross_entropy"] == pytest.approx(
        evaluate(model, examples, [4])[0][0].cross_entropy, rel=1e-6
    )


def test_a_taught_run_goes_on_under_its_own_teacher_alone(folder, whole, tmp_path):
    shutil.copytree(whole[0] / "checkpoint", tmp_path / "teacher")
    taught = (
        *("optim.schedule='constant'", "log.evaluate_every=0", "teacher.share=0.5"),
        f"teacher.name='{tmp_path / 'teacher'}'",
    )
    run(folder, tmp_path / "whole", *taught, "optim.steps=8")
    run(folder, tmp_path / "parts", *taught, "optim.steps=4")
    half = (tmp_path / "parts" / "state.safetensors").read_bytes()
    run(folder, tmp_path / "parts", *taught, "optim.steps=8", resume=True)
    expected, found = trained(tmp_path / "whole"), trained(tmp_path / "parts")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    record = json.loads((tmp_path / "whole" / "record.json").read_text())
    facts = BuddyForCausalLM.from_pretrained(whole[0] / "checkpoint", merge_adapter=True).facts()
    assert record["config"]["taught_by"] == facts
    assert "taught by" in read_card(tmp_path / "whole" / "checkpoint").text
    (tmp_path / "parts" / "state.safetensors").write_bytes(half)
    shutil.rmtree(tmp_path / "teacher")
    shutil.copytree(tmp_path / "whole" / "checkpoint", tmp_path / "teacher")  # of another run
    command = arguments(folder, tmp_path / "parts", *taught, "optim.steps=8", resume=True)
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, TrainingError)
    assert "another run, with other taught_by" in str(refused.exception)


def test_a_teacher_changes_what_is_learned(folder, whole, tmp_path):
    run(folder, tmp_path, f"teacher.name='{folder}'", "log.evaluate_every=0")
    alone, taught = trained(whole[0]), trained(tmp_path)
    name = "parameter.router.decision.up.weight"
    assert not torch.equal(alone[name], taught[name])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("words", r"teacher\.name: .* has another vocabulary \("),
        ("logits", r"teacher\.name: .* makes 98 logits and .* 97: name a model with as many"),
        ("context", r"data\.max_tokens must be at most 8, the context of the teacher"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(folder, tmp_path, change, says):
    model, words = tiny_model("llama"), word_tokenizer()
    if change == "words":
        words.add_tokens(["another"])
    if change == "logits":
        model.resize_token_embeddings(98)
    if change == "context":
        model.config.max_position_embeddings = 8
    model.save_pretrained(tmp_path / "teacher")
    words.save_pretrained(tmp_path / "teacher")
    command = arguments(folder, tmp_path / "out", f"teacher.name='{tmp_path / 'teacher'}'")
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, RecipeError)
    assert re.search(says, str(refused.exception))
    assert not (tmp_path / "out").exists()


def test_a_state_names_no_setting_that_older_versions_lack(folder, tmp_path):
    run(folder, tmp_path, "optim.steps=1", "log.evaluate_every=0")
    with safe_open(tmp_path / "state.safetensors", framework="pt") as file:
        identity = json.loads(file.metadata()["buddy"])["identity"]
    assert not {"teacher", "taught_by"} & identity.keys()
    assert not {"average", "prompt_loss"} & identity["optim"].keys()
    assert "curriculum_steps" not in identity["budget"]
    assert "standardise" not in identity["router"]


def test_two_processes_end_where_one_does(folder, whole, tmp_path):
    # `--cpu` would start one process; `--multi_gpu` says several, and the variable: on CPUs.
    launch = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "buddy"]
    done = subprocess.run(
        [sys.executable, "-m", *launch, *arguments(folder, tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(f"{tmp_path / 'checkpoint'}") == 1
    check_same_run(tmp_path, whole[0])


def check_same_run(out, whole):
    """Two processes took the steps of one."""
    for found, expected in zip(log(out), log(whole), strict=True):
        assert (found["step"], found["kind"]) == (expected["step"], expected["kind"])
        # Gradients are summed in another order, and AdamW makes the most of it.
        if found["kind"] == "train":
            assert found["loss"] == pytest.approx(expected["loss"], rel=2e-3)
            assert found["rows"] == expected["rows"]
        if "cross_entropy" in found:
            assert found["cross_entropy"] == pytest.approx(expected["cross_entropy"], rel=2e-3)
    record = json.loads((out / "record.json").read_text())
    assert record["config"]["processes"] == 2


FAILS = """
from buddy.errors import TrainingError
from buddy.training.router.trainer import JointTrainer
backward = JointTrainer._backward_of
def fail(self, share, examples, seed, step):
    if child == 0 and step == 4:
        raise TrainingError("no such luck")
    return backward(self, share, examples, seed, step)
JointTrainer._backward_of = fail
"""


def test_two_processes_with_shares_of_the_base_fail_together_go_on_and_end_where_one_does(
    folder, whole, tmp_path
):
    out, cpu = tmp_path / "out", {"ACCELERATE_USE_CPU": "true"}
    shares = ("optim.fsdp=true", "optim.micro_batch_tokens=60")
    done, other = run_two(arguments(folder, out, *shares), tmp_path, cpu, before=FAILS)
    assert (done.returncode, other) == (1, 2), done.stderr
    assert done.stderr.count("buddy: ") == done.stderr.count("buddy: no such luck") == 1
    assert "Traceback" not in done.stderr
    done, other = run_two(arguments(folder, out, *shares, resume=True), tmp_path, cpu)
    assert (done.returncode, other) == (0, 0), done.stderr
    assert done.stdout == f"{out / 'checkpoint'}\n"
    check_same_run(out, whole[0])
    model = BuddyForCausalLM.from_pretrained(out / "checkpoint")
    rows = Source(path=str(folder / "rows.jsonl"), template="alpaca", start=40)
    examples = read_all((rows,), load_tokenizer(str(folder)), max_tokens=60)
    assert evaluation(out)[1]["cross_entropy"] == pytest.approx(
        evaluate(model, examples, [4])[0][0].cross_entropy, rel=1e-6
    )


def test_shares_of_the_base_are_of_several_processes_and_of_this_stage(folder, tmp_path):
    done = CliRunner().invoke(app, arguments(folder, tmp_path / "out", "optim.fsdp=true"))
    assert isinstance(done.exception, RecipeError)
    assert "among processes, and one was launched" in str(done.exception)
    planned = [*arguments(folder, tmp_path / "out", "optim.fsdp=true"), "--plan-memory"]
    assert str(CliRunner().invoke(app, planned).exception) == str(done.exception)
    other = ("optim.fsdp=true", "method=layerskip", "router.policy='static:3,2'")
    done = CliRunner().invoke(app, arguments(folder, tmp_path / "out", *other))
    assert isinstance(done.exception, RecipeError)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rate", ["1e-9", "0"])
def test_a_router_that_learns_and_stays_at_its_prior_is_called_collapsed(folder, tmp_path, rate):
    prior = tmp_path / "prior.json"
    results = {"importance": [5.0, 4.0, 3.0, 2.0, 1.0, 6.0]}
    prior.write_text(json.dumps({"kind": "importance", "config": {}, "results": results}))
    done = run(
        folder,
        tmp_path / "out",
        f"router.prior={str(prior)!r}",
        f"optim.router_learning_rate={rate}",
        "optim.steps=2",
        "log.evaluate_rows=40",
        f"data.validation=[{{path='{folder / 'rows.jsonl'}', template='alpaca'}}]",
    )
    is_told = "warning: the router has collapsed" in " ".join(done.stderr.split())
    is_logged = any(line["kind"] == "warning" for line in log(tmp_path / "out"))
    assert is_told == is_logged == (rate != "0")


def test_the_default_prior_of_any_model_is_measured_and_named_in_the_record(folder, tmp_path):
    run(folder, tmp_path, "router.prior='default'", "optim.steps=1")
    record = json.loads((tmp_path / "record.json").read_text())
    assert "quick cosine pass" in record["config"]["measured_prior"]["source"]
    trained = BuddyForCausalLM.from_pretrained(tmp_path / "checkpoint")
    base = BuddyForCausalLM.from_pretrained(folder)
    assert torch.equal(trained.prior, base.prior)
    assert torch.equal(trained.router.decision.prior, base.prior)


def refused(folder, out, *changes, resume=False):
    done = CliRunner().invoke(app, arguments(folder, out, *changes, resume=resume))
    assert done.exit_code == 1
    return done.exception


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ("optim.step=3", RecipeError, "unknown key step"),
        ("data.train=[{path='none.jsonl'}]", DataError, "none.jsonl cannot be read"),
        ("model.name='no-such-model'", ModelError, "no model named"),
        ("router.prior='none.json'", RecipeError, "router.prior: .* `buddy importance .* makes"),
        ("router.policy='static:9,8'", ValueError, "names each block once"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_file_is_written(
    folder, tmp_path, change, error, says
):
    found = refused(folder, tmp_path, change)
    assert isinstance(found, error)
    assert re.search(says, str(found))
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ('{"instruction": "w3", "output": "w4"}\n{"instruction"', "line 2, is no JSON"),
        ('{"question": "w3"}', "line 1, has the fields question: expected instruction and output"),
        ('{"instruction": "w3", "output": 4}', "line 1, field output: expected a text"),
        ('{"instruction": "w3", "output": ""}', "no usable row"),
    ],
)
def test_malformed_data_is_named_by_its_row(folder, tmp_path, text, says):
    (tmp_path / "rows.jsonl").write_text(text)
    rows = f"data.train=[{{path='{tmp_path / 'rows.jsonl'}', template='alpaca'}}]"
    found = refused(folder, tmp_path / "out", rows)
    assert isinstance(found, DataError)
    assert re.search(says, str(found))


def test_a_run_goes_on_with_the_records_it_was_begun_with(folder, tmp_path):
    order = tmp_path / "order.json"
    for removals in ([4, 1, 3, 2], [2, 1, 3, 4]):
        results = {"removal_order": removals}
        RunRecord(kind="importance-x", config={}, results=results, model=None).save(order)
        changes = [f"router.prior={str(order)!r}", "optim.steps=3", "log.tensorboard=false"]
        done = CliRunner().invoke(app, arguments(folder, tmp_path / "run", *changes, resume=True))
    assert isinstance(done.exception, TrainingError), done.exception
    assert f"with other files.{order} (was" in str(done.exception)


def test_a_run_is_not_overwritten_nor_mixed_with_another(folder, whole):
    assert "holds a run already" in str(refused(folder, whole[0]))
    found = refused(folder, whole[0], "optim.learning_rate=1e-3", resume=True)
    assert isinstance(found, TrainingError)
    assert "state of another run, with other optim." in str(found)


def test_a_damaged_state_is_refused(folder, whole, tmp_path):
    content = (whole[0] / "state.safetensors").read_bytes()
    (tmp_path / "state.safetensors").write_bytes(content[: len(content) // 2])
    assert "is damaged" in str(refused(folder, tmp_path, resume=True))


def test_a_state_of_other_validation_rows_is_refused(folder, whole, tmp_path):
    elsewhere = tmp_path / "folder"
    shutil.copytree(folder, elsewhere)
    rows = (folder / "rows.jsonl").read_text().splitlines()
    out = tmp_path / "run"
    shutil.copytree(whole[0], out)
    try:
        (folder / "rows.jsonl").write_text("\n".join(rows[:-1]))
        found = str(refused(folder, out, resume=True))
    finally:
        (folder / "rows.jsonl").write_text("\n".join(rows))
    assert "state of another run, with other data.validation (was '" in found
    assert "data.train" not in found


def test_of_two_trainers_in_one_folder_the_second_is_refused(folder, tmp_path):
    changes = ["optim.steps=4", "log.save_every=99", "log.tensorboard=false"]
    recipe = read_recipe(Recipe, folder / "recipe.toml", changes)
    found = []

    def second(step, numbers):
        if step == 1:
            with pytest.raises(TrainingError) as caught:
                train(recipe, tmp_path, resume=True)
            found.append(str(caught.value))

    train(recipe, tmp_path, listener=RunListener(stepped=second))
    assert found == [
        f"another run is writing to {tmp_path}: wait until it ends, or name another --out"
    ]
    assert len([line for line in log(tmp_path) if line["kind"] == "train"]) == 2


def test_a_run_that_began_while_another_ended_does_not_replace_it(folder, whole, tmp_path):
    recipe = read_recipe(Recipe, folder / "recipe.toml")
    run = Run(recipe, tmp_path)
    shutil.copy(whole[0] / "state.safetensors", tmp_path)
    with pytest.raises(TrainingError, match="holds a run already"), run.claimed():
        pass


@pytest.mark.parametrize(
    ("room", "changes", "says"),
    [
        (20_000, ["log.tensorboard=false"], "the training state .* cannot be written"),
        (5_000, ["log.every=1", "log.save_every=99"], "the log of .* cannot be written"),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_no_half_a_state(folder, tmp_path, room, changes, says):
    # A run that is to write a state, on a file system that takes no more bytes.
    out = tmp_path / "full"
    done = forked.run(arguments(folder, out, *changes), most_bytes=room)
    assert done.returncode == 2, done.stderr[-2000:]
    assert re.search(says, done.stderr)
    assert "Traceback" not in done.stderr
    assert "--resume" in done.stderr
    assert not list(out.glob("*.safetensors"))
    assert not list(out.glob(".*safetensors*"))
