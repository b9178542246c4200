"""Training of gated methods: the pass computes what inference computes, and gates learn."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier

import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.data.examples import Source
from buddy.errors import RecipeError
from buddy.methods.first.run import FirstTrainer
from buddy.methods.gated.gates import Pass
from buddy.methods.gated.passing import GatedRun, last_hidden
from buddy.methods.gated.recipe import GatedRecipe, GateSettings
from buddy.methods.gated.run import GatedTrainer, evaluate_online, train_gated
from buddy.training import packing
from buddy.training.batches import collate, padded_width
from buddy.training.fast import fast_passes
from buddy.training.packing import begin_pass
from buddy.training.recipe import DataSettings
from buddy.training.router.lora import add_lora
from buddy.training.router.recipe import LogSettings, LoraSettings, OptimSettings
from tests.methods.gated.test_policy import METHODS, forced, gated
from tests.product.training.examples import random_examples
from tests.product.training.made import write_rows
from tests.tiny import NUM_BLOCKS, tiny_model

EXAMPLES = random_examples(24)
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def recipe(method, steps=12, **gates):
    return GatedRecipe(
        data=DataSettings(train=(Source(path="unused"),)),
        method=method,
        gates=GateSettings(
            **{"penalty": 1.0, **({"width": 8} if method == "d-llm" else {}), **gates}
        ),
        optim=OptimSettings(learning_rate=1e-2, warmup_steps=1, steps=steps, batch_size=4),
        lora=LoraSettings(rank=2),
    )


def trainer(method, steps=12, *, process=(0, 1), reduce=lambda whole: whole, **gates):
    made = gated(method)
    made.model = add_lora(made.model, LoraSettings(rank=2), seed=0)
    settings = recipe(method, steps, **gates)
    kind = FirstTrainer if method == "first" else GatedTrainer
    return kind(made.train(), settings, EXAMPLES, process=process, reduce=reduce)


@torch.no_grad()
@pytest.mark.parametrize("passes", [lambda backbone: nullcontext(), fast_passes])
@pytest.mark.parametrize("method", METHODS)
def test_the_training_pass_computes_what_inference_computes(method, passes, monkeypatch):
    monkeypatch.setattr(packing, "_ROUND", 8)  # else rectangles of tiny examples are as good
    # Gates that are sure sample nothing else; those of flexidepth sample nothing at all.
    keep = [True, True, True, False, True, False]
    made = gated(method) if method == "flexidepth" else forced(method, keep)
    if method == "mixture-of-depths":  # whose share of tokens is another at inference
        made.learned.config = dataclasses.replace(made.learned.config, share=1.0)
        made.set_policy("mixture-of-depths:0")
    batch = collate(EXAMPLES[:3])
    lengths = torch.tensor([one.num_tokens for one in EXAMPLES[:3]])
    position = torch.arange(batch.token_ids.shape[1])
    real = position < lengths[:, None]
    adapts = method == "first"
    seen = Pass(position, batch.is_prompt, real, torch.Generator(), adapts=adapts)
    run = begin_pass(GatedRun, made.backbone, batch, part=made.learned, seen=seen)
    with passes(made.backbone):
        hidden = last_hidden(run, NUM_BLOCKS)
    out = made(batch.token_ids, real.long(), prompt_mask=batch.is_prompt)
    assert_close(hidden[real], out.lanes.hidden, **TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
def test_adapters_and_gates_are_trained_and_the_loss_falls(method):
    made = trainer(method, steps=30, **({"gate_steps": 0.5} if method == "first" else {}))
    before = {name: p.detach().clone() for name, p in made.parameters.items()}
    losses = [made.step(step).loss for step in range(30)]
    assert sum(losses[-6:]) < sum(losses[:6])
    moved = {name for name, p in made.parameters.items() if not torch.equal(p, before[name])}
    assert any("lora_" in name for name in moved)
    assert any(name.startswith("learned.") for name in moved)


def summed_over(ranks):
    """For each process, here a thread, a function that sums what all of them hand in."""
    barrier, parts = Barrier(ranks, timeout=60), [None] * ranks

    def of(rank):
        def reduce(own):
            parts[rank] = own.detach().clone()
            barrier.wait()
            whole = sum(parts)
            barrier.wait()  # nobody overwrites a part before all have summed
            return whole

        return reduce

    return [of(rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_processes_that_share_a_batch_make_the_gradient_of_one(method, ranks):
    batch = [EXAMPLES[at] for at in (0, 1, 2, 3)]
    widths = [padded_width([one]) for one in batch]
    assert len(set(widths)) > 1  # noise is the same whatever its row is padded to

    def backward(made):
        rows = made._backward(batch, seed=5, step=1)
        return rows, {name: p.grad for name, p in made.parameters.items()}

    aim = {"target": 0.3} if method in ("d-llm", "dash") else {}
    rows, alone = backward(trainer(method, **aim))
    sharing = [
        trainer(method, process=(rank, ranks), reduce=reduce, **aim)
        for rank, reduce in enumerate(summed_over(ranks))
    ]
    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(backward, sharing))
    for one, other in zip(
        sorted(rows), sorted(row for part, _ in found for row in part), strict=True
    ):
        assert other[0] == pytest.approx(one[0], abs=1e-5)
        assert other[1:3] == one[1:3]
    for _, gradients in found:
        for name, gradient in alone.items():
            assert (gradients[name] is None) == (gradient is None)
            if gradient is not None:
                assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-3)  # other sums


@pytest.mark.parametrize("method", ["d-llm", "dash"])
def test_the_depth_goes_where_it_is_asked_to_go(method):
    shares = []
    for target in (0.2, 0.9):
        made = trainer(method, steps=25, target=target, penalty=5.0, learning_rate=5e-2)
        for step in range(25):
            made.step(step)
        made.model.set_policy(method)
        (found,), _ = evaluate_online(made.model, EXAMPLES, ())
        shares.append(found.blocks)
    assert shares[0] < shares[1]


def test_first_trains_its_routers_first_and_its_adapters_under_them():
    made = trainer("first", steps=4, gate_steps=0.5)
    changed = []
    for step in range(4):
        before = {name: p.detach().clone() for name, p in made.parameters.items()}
        made.step(step)
        moved = [name for name, p in made.parameters.items() if not torch.equal(p, before[name])]
        changed.append({"learned" if name.startswith("learned") else "adapters" for name in moved})
    assert changed == [{"learned"}, {"learned"}, {"adapters"}, {"adapters"}]


def test_stages_of_first_have_schedules_of_their_own_and_remember_nothing_of_each_other():
    made = trainer("first", steps=10, gate_steps=0.4)
    optim = dataclasses.replace(made.recipe.optim, schedule="linear", warmup_steps=2)
    made.recipe = dataclasses.replace(made.recipe, optim=optim)
    adapters, routers = made.optimizer.param_groups
    rates = []
    for step in range(10):
        remembered = [parameter in made.optimizer.state for parameter in adapters["params"]]
        assert any(remembered) == (step > 4)
        made.step(step)
        rates.append([group["lr"] / group["peak"] for group in (routers, adapters)])
    first, second = zip(*rates, strict=True)
    assert first == (0.5, 1.0, 1.0, 0.5, *[0.0] * 6)
    assert second == (*[0.0] * 4, 0.5, 1.0, 1.0, 0.75, 0.5, 0.25)
    counts = {int(made.optimizer.state[parameter]["step"]) for parameter in adapters["params"]}
    assert counts == {6}


def test_a_run_writes_a_checkpoint_that_decides_as_the_trained_model_and_goes_on(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    from tests.words import word_tokenizer

    word_tokenizer().save_pretrained(tmp_path / "base")
    rows = write_rows(tmp_path / "rows.jsonl", 12)
    settings = GatedRecipe(
        model=dataclasses.replace(
            recipe("first").model, name=str(tmp_path / "base"), dtype="float32"
        ),
        data=DataSettings(
            train=(Source(path=str(rows)),),
            validation=(Source(path=str(rows), stop=4),),
            max_tokens=40,
        ),
        method="d-llm",
        gates=GateSettings(penalty=1.0, width=8, target=0.5),
        optim=OptimSettings(steps=4, batch_size=2, learning_rate=1e-2),
        log=LogSettings(
            evaluate_budgets=("1.0",), save_every=2, evaluate_every=2, tensorboard=False
        ),
    )
    once = train_gated(settings, tmp_path / "once")
    loaded = BuddyForCausalLM.from_pretrained(once)
    assert loaded.policy.name == "d-llm"
    assert loaded.kv_policy == "mask"
    record = json.loads((tmp_path / "once" / "record.json").read_text())
    assert record["model"]["learned"] == loaded.facts()["learned"]
    (evaluation,) = record["results"]["evaluation"]
    assert 2 <= evaluation["blocks"] <= NUM_BLOCKS


@pytest.mark.parametrize("method", METHODS)
def test_checkpointed_blocks_change_no_gradient(method):
    whole, made = trainer(method), trainer(method)
    optim = dataclasses.replace(made.recipe.optim, activation_checkpointing=True)
    made.recipe = dataclasses.replace(made.recipe, optim=optim)
    expected = whole._backward(whole.order[0], seed=5, step=0)
    assert made._backward(made.order[0], seed=5, step=0) == expected
    for name, parameter in whole.parameters.items():
        assert (found := made.parameters[name].grad) is parameter.grad or torch.equal(
            found, parameter.grad
        )


def test_what_does_not_fit_a_gated_recipe_is_refused():
    with pytest.raises(RecipeError, match="gate_steps is of first alone"):
        recipe("dash", gate_steps=0.5)
    with pytest.raises(RecipeError, match="target is of d-llm and dash alone: leave it out for fi"):
        recipe("first", target=0.7)
    with pytest.raises(RecipeError, match=r"share is of mixture-of-depths alone: .* got 0\.25"):
        recipe("dash", share=0.25)
    with pytest.raises(RecipeError, match="penalty must be"):
        GateSettings(penalty=-1.0)
    with pytest.raises(RecipeError, match=r"lora\.rank and gates\.learning_rate are 0"):
        dataclasses.replace(recipe("dash", learning_rate=0.0), lora=LoraSettings(rank=0))
    with pytest.raises(RecipeError, match=r"lora\.rank is 0, and the steps beyond"):
        dataclasses.replace(recipe("first", gate_steps=0.5), lora=LoraSettings(rank=0))
    with pytest.raises(RecipeError, match=r"optim\.micro_batch_tokens: .* leave it out for dash"):
        dataclasses.replace(recipe("dash"), optim=OptimSettings(micro_batch_tokens=512))
    with pytest.raises(RecipeError, match="keeps no budget"):
        dataclasses.replace(recipe("dash"), log=LogSettings(evaluate_budgets=("0.5",)))
