"""PuDDing: a set chosen from the prompt, kept in decode, and spent exactly."""

import json

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.data.examples import Example
from buddy.depth.policy import Observation, PolicyResources
from buddy.depth.select import select_blocks
from buddy.engine.naive import naive_decode
from buddy.errors import CheckpointError, PolicyError
from buddy.lab.evaluation.answers.answers import losses_under
from buddy.methods.pudding.policy import PuddingClassifier, PuddingConfig, PuddingPolicy
from buddy.policies.learned import outline_part
from buddy.policies.registry import build_policy
from tests.product.engine.decoding import decode
from tests.product.policies.made import ORDERS, random_pudding
from tests.tiny import NUM_BLOCKS, padded, random_ids, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def buddy(model, **options):
    return BuddyForCausalLM(model, learned=options.pop("part", random_pudding()), **options)


def sets_at(blocks, orders=ORDERS):
    """What each set runs at a depth."""
    return [tuple(sorted(set(range(6)) - set(order[: 6 - blocks]))) for order in orders]


def by_hand():
    """Set 0 is predicted to suit a prompt by the first mean value, set 1 by its opposite."""
    config = PuddingConfig(
        num_blocks=6, width=2, orders=((1, 2, 3, 4), (4, 3, 2, 1)), depths=(4,), hidden=2
    )
    part = PuddingClassifier(config)
    with torch.no_grad():
        # silu(a) - silu(-a) = a, so that the outputs are a and -a.
        part.down.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        part.down.bias.zero_()
        part.up.weight.copy_(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
    return part


def observed(values, sees=None):
    values = torch.tensor(values)  # [B, T, W]
    ids = torch.zeros(values.shape[:2], dtype=torch.long)
    sees = torch.ones_like(ids, dtype=torch.bool) if sees is None else torch.tensor(sees)
    return Observation(ids, sees, torch.full_like(values, 9.0), values)


def test_worked_by_hand_each_prompt_gets_the_set_of_its_mean_value():
    policy = PuddingPolicy(by_hand())
    # Means 1, -1, and -3 where a pad of 11 is left out; the second number is read by none.
    seen = observed(
        [[[3.0, 5.0], [-1.0, 5.0]], [[-2.0, 5.0], [0.0, 5.0]], [[-3.0, 5.0], [11.0, 5.0]]],
        [[True, True], [True, True], [True, False]],
    )
    state = policy.observe(None, seen)
    expected = torch.tensor([[[1.0, -1.0]], [[-1.0, 1.0]], [[-3.0, 3.0]]])
    torch.testing.assert_close(state.predicted, expected)
    blocks = torch.tensor([4, 4, 3])
    plan = select_blocks(policy.scores(state, blocks), blocks, pinned=policy.pinned)
    assert plan.executed_sets == ((0, 3, 4, 5), (0, 1, 2, 5), (0, 1, 5))


def test_what_comes_after_the_prompt_changes_no_choice():
    policy = PuddingPolicy(by_hand())
    state = policy.observe(None, observed([[[1.0, 0.0]], [[-1.0, 0.0]]]))
    later = policy.observe(state, observed([[[-9.0, 0.0]], [[9.0, 0.0]]]))
    assert policy.choose(later, torch.tensor([4, 4])).tolist() == [0, 1]


def test_the_first_tokens_that_the_router_sees_are_the_prompt():
    policy = PuddingPolicy(by_hand())
    hidden = [[False], [True]]
    state = policy.observe(None, observed([[[1.0, 0.0]], [[1.0, 0.0]]], hidden))
    state = policy.observe(state, observed([[[-2.0, 0.0]], [[-2.0, 0.0]]]))
    assert policy.choose(state, torch.tensor([4, 4])).tolist() == [1, 0]


def test_the_nearest_measured_depth_decides_and_of_two_the_smaller():
    policy = PuddingPolicy(random_pudding(depths=(2, 4)))
    state = policy.observe(None, observed(torch.zeros(6, 1, 16).tolist()))
    predicted = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]).expand(6, 2, 3)
    state = type(state)(predicted, state.is_decided)
    blocks = torch.tensor([2, 3, 4, 5, 6, 3])
    assert policy.choose(state, blocks).tolist() == [0, 0, 2, 2, 2, 0]


def test_a_prediction_that_is_nan_is_refused_in_one_line():
    policy = PuddingPolicy(by_hand())
    state = policy.observe(None, observed([[[float("nan"), 0.0]]]))
    with pytest.raises(PolicyError, match="predicted log-likelihood is NaN"):
        policy.scores(state, torch.tensor([4]))


@pytest.mark.parametrize("number", range(len(ORDERS)))
def test_forced_to_a_set_it_is_static_pruning_by_its_order(model, number):
    ids = random_ids(3, 9)
    forced = buddy(model, policy=f"pudding:{number}")
    static = BuddyForCausalLM(model, policy=f"static:{','.join(map(str, ORDERS[number]))}")
    with torch.no_grad():
        for budget in ([0.5, "4 blocks", "5 blocks"], "4 blocks"):
            one, other = forced(ids, budget=budget), static(ids, budget=budget)
            assert torch.equal(one.logits, other.logits)
            assert one.plan.executed_sets == other.plan.executed_sets
    made = [
        m.generate(ids, budget=0.5, max_new_tokens=5, do_sample=False) for m in (forced, static)
    ]
    assert torch.equal(*made)


def test_full_depth_is_the_model(model):
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(
            buddy(model, engine="general")(ids, budget=1.0).logits, model(ids).logits
        )


def test_a_mixed_padded_batch_spends_every_budget_and_is_each_row_alone(model):
    rows = [random_ids(1, 4 + 3 * n, seed=n)[0] for n in range(8)]
    budgets = [3, 3, 4, 5, 6, 4, 5, 4]
    routed = buddy(model)
    chosen = []
    for side in ("left", "right"):
        ids, mask = padded(rows, side)
        with torch.no_grad():
            out = routed(ids, mask, budget=[f"{n} blocks" for n in budgets])
        assert out.executed_blocks.tolist() == budgets
        chosen.append(out.plan.executed_sets)
        for row, budget, blocks in zip(rows, budgets, out.plan.executed_sets, strict=True):
            assert blocks in sets_at(budget)
            alone = routed(row[None], budget=f"{budget} blocks")
            assert alone.plan.executed_sets == (blocks,)
    assert chosen[0] == chosen[1]
    fours = {blocks for blocks, n in zip(chosen[0], budgets, strict=True) if n == 4}
    assert len(fours) > 1, "prompts must get sets of their own"


@pytest.mark.parametrize("engine", ["native", "general"])
@pytest.mark.parametrize("kv_policy", ["mask", "lazy"])
def test_decode_keeps_the_set_of_the_prompt_and_equals_the_reference(model, engine, kv_policy):
    prompt, continuation = random_ids(4, 7, seed=5), random_ids(4, 5, seed=50)
    routed = buddy(model, kv_policy=kv_policy, engine=engine)
    options = {"budget": "4 blocks"}
    logits, plans, _ = decode(routed, prompt, torch.ones_like(prompt), continuation, **options)
    whole = torch.cat([prompt, continuation], 1)
    for row in range(0, 4, 3):
        with torch.no_grad():
            expected, kept = naive_decode(
                routed.backbone,
                routed.policy,
                whole[row],
                7,
                blocks=4,
                kv_policy=kv_policy,
                reroute="prefill",
            )
        assert torch.equal(plans[row], kept[1:])
        # atol: the cache, the gather and the batched projection change the order of sums.
        torch.testing.assert_close(logits[row], expected[1:], atol=5e-5, rtol=1e-4)
    with torch.no_grad():
        fresh = [routed(whole[:, :n], **options).plan.executed_sets for n in range(7, 13)]
    assert len(set(fresh[0])) > 1
    assert len(set(fresh)) > 1, "read anew, the answer would change some set"


def test_an_answer_never_reaches_the_choice(model):
    routed = buddy(model)
    prompt = random_ids(6, 5, seed=8)
    sees = torch.zeros(6, 9, dtype=torch.bool)
    sees[:, :5] = True
    plans, seen_whole = set(), set()
    with torch.no_grad():
        for seed in range(6):
            ids = torch.cat([prompt, random_ids(6, 4, seed=100 + seed)], 1)
            plans.add(routed(ids, budget="4 blocks", prompt_mask=sees).plan.executed_sets)
            seen_whole.add(routed(ids, budget="4 blocks").plan.executed_sets)
    alone = routed(prompt, budget="4 blocks").plan.executed_sets
    assert plans == {alone}
    assert len(set(alone)) > 1
    assert len(seen_whole) > 1, "an answer that is seen would change some set"


def test_evaluated_answers_are_routed_by_their_prompts_alone(model):
    routed = buddy(model)
    prompt = tuple(random_ids(1, 5, seed=8)[0].tolist())
    answers = [tuple(random_ids(1, 4, seed=100 + n)[0].tolist()) for n in range(8)]
    rows = [Example(prompt, answer, "made") for answer in answers]
    found = losses_under(routed, routed.policy, lambda p, a: (4,), rows)
    assert len({plan for _, plan, _ in found}) == 1
    assert len({round(loss, 3) for loss, *_ in found}) == 8


def test_a_checkpoint_keeps_sets_and_classifier(model, tmp_path):
    routed = buddy(model, part=random_pudding(depths=(3, 5)))
    routed.save_pretrained(tmp_path / "model")
    loaded = BuddyForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.learned.config == routed.learned.config
    assert loaded.policy.name == "pudding"
    ids = random_ids(8, 9)
    with torch.no_grad():
        one, other = (m(ids, budget="4 blocks") for m in (routed, loaded))
    assert torch.equal(one.logits, other.logits)
    assert len(set(one.plan.executed_sets)) > 1
    assert loaded.facts() == routed.facts()
    half = BuddyForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert {p.dtype for p in half.learned.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"orders": [[1, 2, 3, 3]]}, "orders must name each of blocks 1 to 4 once"),
        ({"orders": []}, "in one order or more, got none"),
        ({"orders": [[1, 2, 3, "4"]]}, "expected int, got '4'"),
        ({"depths": []}, "depths must be ascending"),
        ({"depths": [5, 3]}, "depths must be ascending"),
        ({"depths": [6]}, "from 1 to 5"),
        ({"hidden": 10**9}, "hidden must be at least 1"),
        ({"num_blocks": 1}, "num_blocks must be at least"),
        ({"colour": 1}, "unknown key colour"),
    ],
)
def test_settings_that_no_classifier_has_are_refused_in_one_line(settings, says):
    made = json.loads(json.dumps(random_pudding().to_json()))["settings"]
    assert outline_part("pudding", made, "here").config == random_pudding().config
    with pytest.raises(CheckpointError, match=says) as refused:
        outline_part("pudding", made | settings, "here")
    assert "\n" not in str(refused.value)


def test_a_checkpoint_whose_weights_do_not_fit_its_settings_is_refused(model, tmp_path):
    buddy(model).save_pretrained(tmp_path / "model")
    path = tmp_path / "model/buddy.json"
    manifest = json.loads(path.read_text())
    manifest["learned"]["settings"]["hidden"] = 9
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"learned in .* does not fit its description"):
        BuddyForCausalLM.from_pretrained(tmp_path / "model")


def test_a_part_of_another_model_or_none_is_refused_in_one_line(model):
    with pytest.raises(PolicyError, match=r"trained to read 24 numbers a token .* caches 16"):
        buddy(model, part=random_pudding(width=24))
    with pytest.raises(PolicyError, match="no trained part of policy 'pudding'"):
        BuddyForCausalLM(model, policy="pudding")
    longer = PuddingConfig(
        num_blocks=NUM_BLOCKS + 1, width=16, orders=((1, 2, 3, 4, 5),), depths=(4,)
    )
    with pytest.raises(PolicyError, match="trained for 7 blocks and the model has 6"):
        buddy(model, part=PuddingClassifier(longer))


@pytest.mark.parametrize("argument", ["3", "-1", "x", "1,2", "999999999999", "²"])
def test_a_set_that_is_none_is_refused(argument):
    resources = PolicyResources(num_blocks=NUM_BLOCKS, learned=random_pudding())
    with pytest.raises(PolicyError, match="takes the number of a set"):
        build_policy(f"pudding:{argument}", resources)
