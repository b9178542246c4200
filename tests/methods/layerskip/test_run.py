"""LayerSkip's training: what is dropped, where the loss is taken, and that exits get better."""

import dataclasses
import json
import math

import pytest
import torch
from torch.testing import assert_close
from typer.testing import CliRunner

from buddy import BuddyForCausalLM
from buddy.cli.main import app
from buddy.data.examples import Source
from buddy.engine.naive import naive_hidden
from buddy.errors import RecipeError
from buddy.methods.layerskip.layer_dropout import draw_runs, drop_rates, exit_weights
from buddy.methods.layerskip.recipe import ExitSettings, LayerSkipRecipe
from buddy.methods.layerskip.run import LayerSkipTrainer
from buddy.training.recipe import DataSettings
from buddy.training.router.evaluate import evaluate
from buddy.training.router.lora import add_lora
from buddy.training.router.recipe import BudgetSettings, LoraSettings, OptimSettings, RouterSettings
from tests.product.training.examples import random_examples
from tests.product.training.made import write_recipe
from tests.tiny import NUM_BLOCKS, tiny_model
from tests.words import word_tokenizer

EXAMPLES = random_examples(24)


def recipe(**settings):
    exits = ExitSettings(**settings)
    return LayerSkipRecipe(
        data=DataSettings(train=(Source(path="unused"),)),
        exits=exits,
        optim=OptimSettings(learning_rate=1e-2, warmup_steps=1, steps=12, batch_size=4),
        lora=LoraSettings(rank=4),
    )


def trainer(*, process=(0, 1), **settings):
    adapted = add_lora(tiny_model(), LoraSettings(rank=4), seed=0)
    model = BuddyForCausalLM(adapted, policy="layerskip").train()
    return LayerSkipTrainer(model, recipe(**settings), EXAMPLES, process=process)


def test_the_rate_rises_from_nothing_to_the_highest():
    rates = drop_rates(0.2, 30)
    assert rates[0] == 0.0
    assert rates[29] == pytest.approx(0.2)
    # By hand: exp(ln 2 * 10/29) - 1 = 2 ** (10/29) - 1.
    assert rates[10] == pytest.approx(0.2 * (2 ** (10 / 29) - 1))


def test_examples_drop_blocks_of_their_own_at_the_rates():
    rates = drop_rates(0.5, NUM_BLOCKS)
    drawn = torch.tensor(
        [draw_runs(rates, seed, place) for seed in range(50) for place in range(4)]
    )
    assert bool(drawn[:, 0].all())
    # 200 draws: five standard errors.
    for block, rate in enumerate(rates):
        error = math.sqrt(rate * (1 - rate) / 200)
        assert abs(float((~drawn[:, block]).float().mean()) - rate) <= 5 * error
    assert draw_runs(rates, 3, 1) == draw_runs(rates, 3, 1)
    assert len({tuple(one.tolist()) for one in drawn}) > 4


def test_exits_rotate_and_deeper_ones_weigh_more():
    # 6 blocks, period 2; exits after blocks 2 and 4 are even, after 3 odd; the last is always in.
    even = exit_weights("rotational", 2, 1.0, 6, 0, 12)
    odd = exit_weights("rotational", 2, 1.0, 6, 1, 12)
    # By hand: 2*3/2 = 3, 4*5/2 = 10, and 5 + 4*5/2 = 15 of the last.
    assert even == pytest.approx({2: 3 / 28, 4: 10 / 28, 5: 15 / 28})
    assert odd == pytest.approx({3: 6 / 21, 5: 15 / 21})
    assert exit_weights("rotational", 2, 0.0, 6, 0, 12)[5] == 1.0


def test_exits_join_one_by_one_from_the_last_until_half_of_the_run():
    taken = [sorted(exit_weights("gradual", 8, 1.0, 6, step, 24)) for step in range(0, 24, 2)]
    # One more every 24 / 12 steps; those after blocks 0 and 1 are no budget.
    assert taken[:5] == [[5], [4, 5], [3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5]]
    assert taken[-1] == [2, 3, 4, 5]


def test_the_loss_is_that_of_the_reference_at_each_exit():
    """Also where an example drops blocks: they are skipped by all its tokens."""
    made = trainer(dropout=0.9, period=1)
    model, examples = made.model.eval(), made.order[0]
    rows = made._backward(examples, seed=5, step=0)
    assert len({plan for _, _, plan, _ in rows}) > 1
    weights = exit_weights("rotational", 1, 1.0, NUM_BLOCKS, 0, 12)
    # A block that all examples drop has no gradient.
    slopes = {name: p.grad for name, p in made.parameters.items() if p.grad is not None}
    made.optimizer.zero_grad()
    share = made._weights(examples)
    total = torch.zeros(())
    for one, (reported, depth, plan, weight), mine in zip(examples, rows, share, strict=True):
        assert depth == len(plan)
        assert weight == pytest.approx(mine)
        ids = torch.tensor([*one.prompt, *one.answer])
        at = slice(len(one.prompt) - 1, len(ids) - 1)
        for block, part in weights.items():
            runs = torch.zeros(len(ids), NUM_BLOCKS, dtype=torch.bool)
            runs[:, [b for b in plan if b <= block]] = True
            hidden = naive_hidden(model.backbone, ids, runs, "project")
            loss = torch.nn.functional.cross_entropy(
                model.backbone.logits(hidden)[at], torch.tensor(one.answer)
            )
            total = total + mine * part * loss
        assert reported == pytest.approx(loss.item(), rel=1e-4)
    total.backward()
    for name, slope in slopes.items():
        assert_close(slope, made.parameters[name].grad, atol=1e-5, rtol=1e-3)  # other sums
    assert max(float(slope.abs().max()) for slope in slopes.values()) > 1e-3


def test_two_processes_make_the_gradient_of_one():
    alone = trainer()
    rows = alone._backward(alone.order[0], seed=5, step=0)
    parts = []
    for rank in range(2):
        made = trainer(process=(rank, 2))
        made._reduce = lambda whole: whole
        found = made._backward(made.order[0], seed=5, step=0)
        parts.append((found, {n: p.grad.clone() for n, p in made.parameters.items()}))
    both = sorted(parts[0][0] + parts[1][0])
    for found, expected in zip(both, sorted(rows), strict=True):
        assert found[0] == pytest.approx(expected[0], abs=1e-5)
        assert found[1:3] == expected[1:3]
    for name, parameter in alone.parameters.items():
        whole = parts[0][1][name] + parts[1][1][name]
        assert_close(whole, parameter.grad, atol=1e-5, rtol=1e-4)


def test_micro_batches_of_checkpointed_blocks_make_the_gradient_of_the_batch():
    whole, made = trainer(), trainer()
    optim = dataclasses.replace(
        made.recipe.optim, micro_batch_tokens=30, activation_checkpointing=True
    )
    data = dataclasses.replace(made.recipe.data, max_tokens=24)
    made.recipe = dataclasses.replace(made.recipe, optim=optim, data=data)
    assert len(list(made._shares(made.order[0]))) > 1
    rows = made._backward(made.order[0], seed=5, step=0)
    for row, expected in zip(rows, whole._backward(whole.order[0], seed=5, step=0), strict=True):
        assert row == (pytest.approx(expected[0], abs=1e-5), *expected[1:])
    for name, parameter in whole.parameters.items():
        assert_close(made.parameters[name].grad, parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("curriculum", ["rotational", "gradual"])
def test_every_exit_gets_better(curriculum):
    made = trainer(curriculum=curriculum, period=2)
    budgets = [3, 4, 5, 6]
    before, _ = evaluate(made.model, EXAMPLES, budgets)
    for step in range(12):
        made.step(step)
    after, _ = evaluate(made.model, EXAMPLES, budgets)
    for old, new in zip(before, after, strict=True):
        assert new.cross_entropy < old.cross_entropy - 0.05


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"router": RouterSettings()}, "router: layerskip has none"),
        ({"budget": BudgetSettings(low="0.6")}, "draws no budgets"),
        ({"lora": LoraSettings(rank=0)}, "nothing to train"),
    ],
)
def test_what_the_method_has_not_is_refused_in_one_line(change, says):
    with pytest.raises(RecipeError, match=says) as refused:
        LayerSkipRecipe(data=DataSettings(train=(Source(path="unused"),)), **change)
    assert "\n" not in str(refused.value)


def test_a_recipe_trains_a_checkpoint_that_runs_at_any_exit(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path / "stage1")
    word_tokenizer().save_pretrained(tmp_path / "stage1")
    path = write_recipe(
        tmp_path,
        optim__steps=4,
        log__evaluate_budgets=["1.0", "4 blocks"],
        exits__period=2,
        lora__rank=2,
    )
    path.write_text('method = "layerskip"\n' + path.read_text())
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["train", str(path), "--out", str(out)])
    assert done.exit_code == 0, (done.stderr, done.exception)
    made = BuddyForCausalLM.from_pretrained(out / "checkpoint")
    assert made.policy.name == "layerskip"
    record = json.loads((out / "record.json").read_text())
    assert record["config"]["exits"]["period"] == 2
    assert [one["blocks"] for one in record["results"]["evaluation"]] == [6, 4]
