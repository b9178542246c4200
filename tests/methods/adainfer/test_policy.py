"""AdaInfer: when a token stops, and what that leaves for later tokens and passes."""

import math
import shutil

import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.depth.policy import NewTokens
from buddy.engine.naive import naive_hidden
from buddy.errors import PolicyError
from buddy.methods.adainfer.policy import (
    AdaInferClassifier,
    AdaInferConfig,
    AdaInferPolicy,
    Stopped,
    logit_features,
)
from tests.tiny import NUM_BLOCKS, every_kv_policy, random_ids, tiny_model
from tests.words import word_tokenizer

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}  # the cache and the gather change the order of sums


def classifier(*, first_exit=3, threshold=0.5, num_blocks=NUM_BLOCKS, bias=-0.3):
    made = AdaInferClassifier(
        AdaInferConfig(num_blocks=num_blocks, first_exit=first_exit, threshold=threshold)
    )
    with torch.no_grad():
        # Deeper blocks ask for less, so that tokens stop at different ones; block 4: (2, 3).
        scale = 1 + 0.3 * (torch.arange(num_blocks) - 4)
        made.weight[:] = scale[:, None] * torch.tensor([2.0, 3.0])
        made.bias[:] = bias
    return made


def adaptive(*, spec=None, first_exit=3, **options):
    return BuddyForCausalLM(
        tiny_model(), learned=classifier(first_exit=first_exit), policy=spec, **options
    )


def test_features_and_probability_are_worked_by_hand():
    # Probabilities 1/2, 1/3, 1/6: gap 1/6, best 1/2.
    logits = torch.tensor([[3.0, 2.0, 1.0]]).log()
    features = logit_features(logits)
    assert_close(features, torch.tensor([[1 / 6, 1 / 2]]))
    # 2/6 + 3/2 - 0.3 = 23/15.
    found = classifier().settled(4, features)
    assert found.tolist() == pytest.approx([1 / (1 + math.exp(-23 / 15))])


class _Told:
    """Logits that are the residual itself."""

    dtype = torch.float32

    def logits(self, hidden):
        return hidden


def test_a_token_that_has_stopped_stays_stopped_and_is_looked_at_no_more():
    # Before block 4. Torn between three tokens: 3/3 - 2 = -1. Sure: about 2 + 3 - 2 = 3.
    policy = AdaInferPolicy(classifier(bias=-2.0), _Told(), 0.5)
    new = NewTokens(torch.zeros(3).long(), torch.arange(3), torch.ones(3, dtype=torch.bool), [None])
    state = policy.begin(new)
    assert isinstance(state, Stopped)
    sure, torn = torch.tensor([9.0, 0.0, 0.0]), torch.zeros(3)
    assert policy.keep(state, 3, torch.stack([sure, torn, torn])).tolist() == [False, True, True]
    # The first one is torn now, and the second one sure.
    assert policy.keep(state, 4, torch.stack([torn, sure, torn])).tolist() == [False, False, True]
    broken = torch.full((3,), math.nan)
    kept = policy.keep(state, 5, torch.stack([broken, broken, torn]))
    assert kept.tolist() == [False, False, True]


@pytest.mark.parametrize("engine", ["auto", "general"])
@torch.no_grad()
def test_a_threshold_of_1_is_full_depth_bit_for_bit(engine):
    buddy, full = adaptive(spec="adainfer:1", engine=engine), adaptive(spec="full", engine=engine)
    ids = random_ids(2, 7)
    found, expected = buddy(ids), full(ids)
    assert torch.equal(found.logits, expected.logits)
    for step in range(3):
        new = random_ids(2, 1, seed=step)
        found = buddy(new, cache=found.cache)
        expected = full(new, cache=expected.cache)
        assert torch.equal(found.logits, expected.logits)
        assert found.executed_blocks.tolist() == [NUM_BLOCKS] * 2


@pytest.mark.parametrize("engine", ["auto", "general"])
@pytest.mark.parametrize("exit_", [3, 5])
@torch.no_grad()
def test_a_threshold_of_0_is_the_exit_at_the_first_block_that_is_asked_about(exit_, engine):
    buddy = adaptive(spec="adainfer:0", first_exit=exit_, engine=engine)
    exits = adaptive(spec="layerskip", engine=engine)
    budget = f"{exit_} blocks"
    ids = random_ids(2, 7)
    out = buddy(ids)
    assert torch.equal(out.logits, exits(ids, budget=budget).logits)
    assert out.plan.executed_sets == (tuple(range(exit_)),) * 2
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(
        buddy.generate(ids, **options), exits.generate(ids, budget=budget, **options)
    )


def reference(buddy, ids, runs_before, kv_policy):
    """Runs of the last token, asked of the reference block by block, and its residual."""
    policy = buddy.policy
    runs = torch.cat([runs_before, torch.ones(1, NUM_BLOCKS, dtype=torch.bool)])
    for block in policy.governed:
        cut = runs.clone()
        cut[:, block:] = False  # the residual that enters the block
        hidden = naive_hidden(buddy.backbone, ids, cut, kv_policy)
        settled = policy._classifier.settled(
            block, logit_features(buddy.backbone.logits(hidden[-1:]))
        )
        if float(settled) > policy.threshold:
            runs[-1, block:] = False
            break
    return runs, naive_hidden(buddy.backbone, ids, runs, kv_policy)[-1]


@pytest.mark.parametrize("engine", ["native", "general"])
@every_kv_policy
@torch.no_grad()
def test_cached_decode_equals_the_reference_asked_block_by_block(engine, kv_policy):
    if engine == "native" and shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    buddy = adaptive(kv_policy=kv_policy, engine=engine)
    ids = random_ids(1, 16)
    out = buddy(ids[:, :5])
    runs = out.lanes.plan.mask
    for step in range(5, 16):
        out = buddy(ids[:, step : step + 1], cache=out.cache)
        runs, expected = reference(buddy, ids[0, : step + 1], runs, kv_policy)
        assert torch.equal(out.lanes.plan.mask[0], runs[-1])
        assert_close(out.lanes.hidden[0], expected, **TOLERANCE)
        assert out.executed_blocks.tolist() == [int(runs[-1].sum())]
    assert len(set(runs.sum(1).tolist())) > 2  # tokens stop at different blocks


@torch.no_grad()
def test_tokens_decide_alike_in_one_pass_and_in_many():
    buddy = adaptive()
    ids = random_ids(1, 10)
    whole = buddy(ids)
    session, depths, logits = None, [], []
    for step in range(10):
        out = buddy(ids[:, step : step + 1], cache=session, use_cache=True)
        session = out.cache
        depths.append(int(out.executed_blocks[0]))
        logits.append(out.logits[0, -1])
    assert whole.lanes.executed.tolist() == depths
    assert_close(torch.stack(logits), whole.logits[0], **TOLERANCE)


def test_a_checkpoint_keeps_classifiers_and_threshold(tmp_path):
    buddy = adaptive()
    assert buddy.policy.name == "adainfer"  # the trained part brings its policy
    buddy.save_pretrained(tmp_path / "made", tokenizer=word_tokenizer())
    again = BuddyForCausalLM.from_pretrained(tmp_path / "made")
    assert again.policy.describe() == "AdaInfer, stops above 0.5"
    assert again.learned.to_json() == buddy.learned.to_json()
    ids = random_ids(2, 9)
    with torch.no_grad():
        found, expected = again(ids), buddy(ids)
    assert torch.equal(found.logits, expected.logits)
    assert found.lanes.plan == expected.lanes.plan
    assert BuddyForCausalLM.from_pretrained(
        tmp_path / "made", policy="adainfer:0.25"
    ).policy.threshold == pytest.approx(0.25)


@pytest.mark.parametrize("text", ["x", "1.5", "-0.1", "nan", "inf"])
def test_what_is_no_threshold_is_refused(text):
    with pytest.raises(PolicyError, match="a probability from 0 to 1") as refused:
        adaptive(spec=f"adainfer:{text}")
    assert "\n" not in str(refused.value)


def test_a_part_that_is_missing_or_of_another_model_is_refused_in_one_line():
    with pytest.raises(PolicyError, match="no trained part of policy 'adainfer'") as refused:
        BuddyForCausalLM(tiny_model(), policy="adainfer")
    assert "\n" not in str(refused.value)
    with pytest.raises(PolicyError, match="trained for 8 blocks and the model has 6") as refused:
        BuddyForCausalLM(tiny_model(), learned=classifier(num_blocks=8))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_blocks": 6, "first_exit": 6}, "first_exit must be below num_blocks, 6"),
        ({"num_blocks": 6, "first_exit": 0}, "first_exit must be at least 1"),
        ({"num_blocks": 6, "first_exit": 2, "threshold": 1.5}, "threshold must be"),
    ],
)
def test_settings_that_fit_nothing_are_refused(settings, says):
    with pytest.raises(PolicyError, match=says):
        AdaInferConfig(**settings)
