"""Rows of a batch that few blocks draft for are the plain ones, and run the same blocks."""

import pytest
import torch

from buddy import BuddyForCausalLM, DepthTrace
from buddy.errors import BudgetError, PolicyError
from buddy.generation import depth_drafts, drafted_rows, shallow
from tests.product.drafting import Clock, say_little
from tests.product.engine.test_tokenwise import Online
from tests.tiny import every_kv_policy, random_ids, tiny_buddy, tiny_model

every_engine = pytest.mark.parametrize("engine", ["auto", "general"])
both_kinds = pytest.mark.parametrize("drafts", ["3 blocks", "ngram+3 blocks"])


def agreeing(share=0.1, **options):
    """A model whose later blocks say little, so that few of them are right now and then."""
    return say_little(tiny_buddy(**options), share)


def passes(monkeypatch):
    """Rows of each pass of few blocks."""
    seen, original = [], shallow.run_step

    def run(backbone, policy, session, step, **more):
        seen.append(len(step.sequence_ids))
        return original(backbone, policy, session, step, **more)

    monkeypatch.setattr(shallow, "run_step", run)
    return seen


def padded_prompts():
    """Four prompts of 9 to 12 tokens, and their mask."""
    ids = random_ids(4, 12, seed=2)
    mask = torch.ones_like(ids)
    for row, pads in enumerate((3, 0, 1, 2)):
        ids[row, :pads] = mask[row, :pads] = 0
    return ids, mask


def by_row(trace):
    """What ran for each token of each row."""
    return [
        [step.plans[row] for step in trace.steps if step.plans[row]]
        for row in range(trace.steps[0].batch)
    ]


def check_same(buddy, drafts, **options):
    """Compare texts without drafts and with them, and all that is told of them; return them."""
    ids, mask = padded_prompts()
    options = {"max_new_tokens": 14, "do_sample": False, "attention_mask": mask} | options
    first, second = DepthTrace(), DepthTrace()
    plain = buddy.generate(ids, trace=first, **options)
    assert torch.equal(buddy.generate(ids, trace=second, drafts=drafts, **options), plain)
    assert by_row(second) == by_row(first)
    assert second.finish_reasons == first.finish_reasons
    assert second.blocks_per_token == first.blocks_per_token
    return plain


@pytest.mark.usefixtures("long_drafts")
@both_kinds
@every_engine
@pytest.mark.parametrize("budget", [None, ["4 blocks", "6 blocks", "5 blocks", "4 blocks"]])
@pytest.mark.parametrize("ends", [False, True])
def test_rows_are_those_without_drafts(drafts, engine, budget, ends, monkeypatch):
    buddy, kept, seen = agreeing(engine=engine), set(), passes(monkeypatch)
    original = drafted_rows._Row.take

    def take(self, drafted, best):
        kept.add((len(drafted), count := original(self, drafted, best)))
        return count

    monkeypatch.setattr(drafted_rows._Row, "take", take)
    options = {"budget": budget, "pad_token_id": 0}
    if ends:
        plain = check_same(buddy, None, **options)
        options["eos_token_id"] = int(plain[1, 12 + 4])
    check_same(buddy, drafts, **options)
    assert len(set(seen)) > 1, "rows are ready at different times"
    assert any(count > 1 for _, count in kept), "some are right"
    assert any(count <= drafted for drafted, count in kept), "and some are wrong"


@pytest.mark.usefixtures("long_drafts")
@every_kv_policy
@pytest.mark.parametrize("reroute", ["step", "prefill", 3])
def test_blocks_are_chosen_again_when_they_would_be(kv_policy, reroute, monkeypatch):
    buddy, seen = agreeing(context="key", summary="ema", kv_policy=kv_policy), passes(monkeypatch)
    check_same(buddy, "3 blocks", budget="4 blocks", prefill_budget="5 blocks", reroute=reroute)
    assert seen


@pytest.mark.usefixtures("long_drafts")
@pytest.mark.parametrize("exits", [False, True])
def test_a_pass_drafts_a_token_of_each_row_that_has_room(exits, monkeypatch):
    buddy = agreeing(0.0, policy="layerskip" if exits else "static:1,2,3,4")
    seen = passes(monkeypatch)
    check_same(buddy, "3 blocks", max_new_tokens=6)
    assert seen == [4] * 4, "the first token is the prefill's, the last is the verification's"


@pytest.mark.parametrize(
    ("share", "shallow_s", "least", "most"),
    [
        (0.0, 0.4, 0.4, 0.8),  # right and cheap
        (0.0, 5.0, 1.0, 1.3),  # right and dear: one pass says so
        (1.0, 0.4, 1.0, 1.3),  # wrong and cheap
    ],
)
def test_few_blocks_draft_only_while_it_pays(share, shallow_s, least, most, monkeypatch):
    monkeypatch.setattr(depth_drafts, "DRAFTED_WORDS", 1.0)
    clock = Clock()
    for module, seconds in ((shallow, shallow_s), (drafted_rows, 1.0)):
        clock.times(monkeypatch, module, seconds)
        monkeypatch.setattr(module, "time", clock)
    buddy, seen = agreeing(share), passes(monkeypatch)
    with torch.no_grad():
        buddy.backbone.head.weight.mul_(9)  # it is sure
    ids = random_ids(3, 4, seed=5)
    buddy.generate(ids, drafts="3 blocks", max_new_tokens=60, do_sample=False)
    assert least <= clock.now / 60 < most
    assert seen, "it has been tried"


def test_a_pass_of_few_blocks_that_fails_is_told(long_drafts, monkeypatch):
    def fails(*args, **more):
        raise RuntimeError("no memory")

    monkeypatch.setattr(shallow, "run_step", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        tiny_buddy().generate(random_ids(2, 5), drafts="3 blocks", max_new_tokens=4)


def test_what_cannot_be_drafted_for_is_refused_by_name():
    buddy, ids = tiny_buddy(), random_ids(2, 5)
    for options, error, words in (
        ({"budget": ["4 blocks", "3 blocks"]}, PolicyError, r"row 1's 3 of 6 blocks, got 3"),
        ({"drafts": "ngram+1.0"}, PolicyError, r"row 0's 6 of 6 blocks, got 6"),
        ({"budget": [1.0, lambda progress: 4]}, PolicyError, "row 1's do not"),
        ({"drafts": "2 blocks"}, BudgetError, "3 to 6 blocks"),
        ({"do_sample": True}, PolicyError, "got do_sample"),
        ({"do_sample": True, "num_return_sequences": 2}, PolicyError, "got do_sample"),
        ({"repetition_penalty": 1.3}, PolicyError, "RepetitionPenaltyLogitsProcessor"),
        ({"batch_route": "shared"}, PolicyError, 'batch_route="shared"'),
        ({"cache": buddy.new_session(2, 32)}, PolicyError, "got cache"),
    ):
        with pytest.raises(error, match=words):
            buddy.generate(ids, **{"max_new_tokens": 3, "drafts": "3 blocks"} | options)
    with pytest.raises(BudgetError, match="3 blocks cannot be spent"):
        tiny_buddy(policy="static:2,3").generate(ids, drafts="3 blocks", max_new_tokens=3)
    online = BuddyForCausalLM(tiny_model(), policy=Online(6))
    for drafts in ("3 blocks", "ngram+3 blocks"):
        with pytest.raises(PolicyError, match="decides while blocks run"):
            online.generate(ids, drafts=drafts, max_new_tokens=3)
