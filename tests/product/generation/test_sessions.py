"""A session is gone on from by its own model and policy alone, with pads on either side."""

import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.errors import PolicyError, PromptError
from tests.product.engine.test_lanes import needs_cc
from tests.product.policies.made import random_pudding
from tests.tiny import NUM_BLOCKS, random_ids, random_router, tiny_buddy, tiny_model

every_engine = pytest.mark.parametrize(
    "engine", ["general", pytest.param("native", marks=needs_cc)]
)
FIRST = random_ids(2, 5)
MORE = {"max_new_tokens": 4, "do_sample": False}


def turn(model, session, ids=None, **options):
    ids = torch.cat([FIRST, random_ids(2, 2, seed=7)], 1) if ids is None else ids
    return model.generate(ids, cache=session, **MORE, **options)


@every_engine
@torch.no_grad()
def test_a_session_of_another_model_is_refused_and_that_of_a_twin_is_not(engine):
    first, second = tiny_buddy(engine=engine), tiny_buddy(engine=engine)
    session = first(FIRST).cache
    for go_on in (turn, lambda model, cache: model(FIRST[:, :1], cache=cache)):
        with pytest.raises(PromptError, match="a session of another model"):
            go_on(second, session)
    twin = BuddyForCausalLM(first.model, router=first.router, engine="general")
    assert torch.equal(turn(twin, session), turn(first, first(FIRST).cache))


@every_engine
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("static", "routed"),
        ("random", "routed"),
        ("full", "routed"),
        ("routed", "random"),
        ("full", "random"),
        ("static", "pudding"),
        ("routed", "pudding"),
    ],
)
def test_another_policys_session_is_refused_in_words(engine, before, after):
    model = tiny_model()
    buddy = BuddyForCausalLM(
        model,
        router=random_router(model),
        learned=random_pudding(),
        engine=engine,
        policy="static:2,3,4,1" if before == "static" else before,
    )
    depth = 1.0 if before == "full" else "4 blocks"
    made = buddy.generate(FIRST, budget=depth, return_dict_in_generate=True, **MORE)
    session = made.past_key_values
    buddy.set_policy(after)
    length = session.get_seq_length()
    ids = random_ids(2, length + 1)
    with pytest.raises(PolicyError, match=f"begun under another policy, and {after} cannot go on"):
        buddy.generate(ids, cache=session, budget="4 blocks", **MORE)
    assert session.get_seq_length() == length


@every_engine
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_a_second_turn_may_be_padded_on_either_side(engine, side):
    buddy = tiny_buddy(engine=engine)
    new = random_ids(2, 3, seed=8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5 if side == "left" else 7] = 0
    made = turn(
        buddy,
        buddy(FIRST, budget="4 blocks").cache,
        torch.cat([FIRST, new], 1),
        attention_mask=mask,
        budget="4 blocks",
    )
    for row, kept in enumerate((slice(0, 3), slice(1, 3) if side == "left" else slice(0, 2))):
        alone = turn(
            buddy,
            buddy(FIRST[row : row + 1], budget="4 blocks").cache,
            torch.cat([FIRST[row], new[row, kept]])[None],
            budget="4 blocks",
        )
        assert torch.equal(made[row, 8:], alone[0, -4:])


@torch.no_grad()
def test_a_row_without_a_new_token_is_refused():
    buddy = tiny_buddy()
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    with pytest.raises(PromptError, match="row 1 has no new token in the 2 columns after the 5"):
        turn(buddy, buddy(FIRST).cache, attention_mask=mask)
    with pytest.raises(PromptError, match="row 0 has no new token in the 0 columns"):
        turn(buddy, buddy(FIRST).cache, FIRST)


@pytest.mark.parametrize("policy", ["routed", "static:2,3,4,1"])
@pytest.mark.parametrize("kv_policy", ["lazy", "project", "mask", "zero"])
@pytest.mark.parametrize(
    ("engine", "family"),
    [
        *(("general", family) for family in ("llama", "gemma2")),
        *(pytest.param("native", family, marks=needs_cc) for family in ("llama", "qwen3")),
    ],
)
def test_under_autocast_a_session_keeps_the_models_format(engine, policy, kv_policy, family):
    buddy = tiny_buddy(family, engine=engine, kv_policy=kv_policy)
    buddy.set_policy(policy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = buddy.generate(
            FIRST, budget="4 blocks", return_dict_in_generate=True, output_scores=True, **MORE
        )
    keys, values, _ = made.past_key_values.kv.buffers()
    assert {held.dtype for held in (*keys, *values) if held is not None} == {torch.float32}
    plain = buddy.generate(
        FIRST, budget="4 blocks", return_dict_in_generate=True, output_scores=True, **MORE
    )
    # The plan is of the router in float32 in both, the products of bfloat16 in one of them.
    assert_close(made.scores[0], plain.scores[0], atol=0.1, rtol=0.05)


@every_engine
def test_a_model_may_be_made_under_inference_mode(engine):
    with torch.inference_mode():
        made = tiny_buddy(engine=engine)
        inside = made.generate(FIRST, budget="4 blocks", **MORE)
    expected = tiny_buddy(engine=engine).generate(FIRST, budget="4 blocks", **MORE)
    assert torch.equal(inside, expected)
    assert torch.equal(made.generate(FIRST, budget="4 blocks", **MORE), expected)


@every_engine
@pytest.mark.parametrize("kv_policy", ["lazy", "project", "mask", "zero"])
def test_a_session_goes_on_in_and_out_of_inference_mode(engine, kv_policy):
    modes = (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad)

    def logits_of(*modes):
        buddy, cache, logits = tiny_buddy(engine=engine, kv_policy=kv_policy), None, []
        for blocks, mode in zip((4, 3, 5, 4), modes, strict=True):
            ids = random_ids(2, 15, seed=blocks)  # the cache grows
            with mode():
                out = buddy(ids, cache=cache, budget=f"{blocks} blocks")
            cache, logits = out.cache, [*logits, out.logits.detach()]
        return torch.cat(logits, 1)

    expected = logits_of(*[torch.no_grad] * 4)
    assert_close(logits_of(*modes), expected)
    assert_close(logits_of(*modes[1:], torch.inference_mode), expected)


@needs_cc
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_kernel_reads_float32_whatever_torchs_default_is(dtype):
    buddy = tiny_buddy(engine="native")
    expected = tiny_buddy(engine="native").generate(FIRST, budget=NUM_BLOCKS / 6, **MORE)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(buddy.generate(FIRST, budget=NUM_BLOCKS / 6, **MORE), expected)
    finally:
        torch.set_default_dtype(torch.float32)
