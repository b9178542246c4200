"""A text that is drafted from its own n-grams is the plain one, and runs the same blocks."""

import pytest
import torch
from transformers import StoppingCriteria

from buddy import DepthTrace
from buddy.budget.thinking import ThinkingMarks
from buddy.errors import BudgetError, PolicyError
from buddy.generation import depth_drafts, drafter, speculative
from buddy.generation.drafts import Drafts, read_drafts
from tests.tiny import every_kv_policy, random_ids, tiny_buddy

engines = pytest.mark.parametrize("engine", ["auto", "general"])


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Draft whatever it costs: a tiny random model is rarely right."""
    monkeypatch.setattr(drafter, "draft_length", lambda chance, cost, rows, most: max(0, most))


def repeating(rows=1, seed=0):
    """Prompts that say everything thrice, so that there are drafts from the first token on."""
    return random_ids(rows, 5, seed=seed).repeat(1, 3)


def count_drafts(monkeypatch):
    """(tokens drafted, tokens kept) of each pass of a row that verified some."""
    counts, original = [], drafter.NgramDrafter.judged

    def judged(self, accepted):
        if self._drafted:
            counts.append((self._drafted, accepted))
        original(self, accepted)

    monkeypatch.setattr(drafter.NgramDrafter, "judged", judged)
    return counts


def plans(trace):
    return [step.plans for step in trace.steps]


def both(buddy, ids, drafts="ngram", **options):
    """The text without drafts and with them, and what ran for each token."""
    options = {"max_new_tokens": 30, "do_sample": False} | options
    made = []
    for kind in (None, drafts):
        trace = DepthTrace()
        torch.manual_seed(5)
        text = buddy.generate(ids, drafts=kind, trace=trace, **options)
        made.append((text, trace))
    return made


@every_kv_policy
@engines
@pytest.mark.parametrize(
    "budget", [None, "4 blocks", {"prefill_budget": "5 blocks", "budget": "3 blocks"}]
)
def test_a_drafted_text_is_the_plain_one_and_runs_the_same(kv_policy, engine, budget, monkeypatch):
    buddy = tiny_buddy(kv_policy=kv_policy, engine=engine)
    counts = count_drafts(monkeypatch)
    options = budget if isinstance(budget, dict) else {"budget": budget}
    (plain, first), (drafted, second) = both(buddy, repeating(), **options)
    assert torch.equal(drafted, plain)
    assert plans(second) == plans(first)
    assert second.blocks_per_token == first.blocks_per_token
    assert any(accepted > 0 for _, accepted in counts)
    assert any(accepted < drafted for drafted, accepted in counts)


@pytest.mark.parametrize("reroute", ["prefill", 3])
def test_blocks_are_chosen_again_when_they_would_be(reroute):
    buddy = tiny_buddy(context="key", summary="ema")
    (plain, first), (drafted, second) = both(buddy, repeating(), budget="4 blocks", reroute=reroute)
    assert torch.equal(drafted, plain)
    assert plans(second) == plans(first)


def test_a_callable_is_asked_of_each_token_as_without_drafts():
    buddy, asked = tiny_buddy(), []

    def budget(progress):
        asked.append((progress.is_prompt, progress.new_tokens, progress.tokens, progress.executed))
        return f"{3 + progress.executed % 3} blocks"

    (plain, first), _ = both(buddy, repeating(), budget=budget, drafts=None)
    before = set(asked)
    _, (drafted, second) = both(buddy, repeating(), budget=budget)
    assert torch.equal(drafted, plain)
    assert plans(second) == plans(first)
    assert before <= set(asked)
    assert {count for is_prompt, count, *_ in asked if not is_prompt} == {1}


def test_a_seed_draws_the_same_text():
    buddy = tiny_buddy()
    with torch.no_grad():
        buddy.model.lm_head.weight.mul_(3)  # so that some drafts are right
    sampled = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.05}
    texts = set()
    for seed in range(3):
        (plain, _), (drafted, _) = both(buddy, repeating(seed=seed), budget="4 blocks", **sampled)
        assert torch.equal(drafted, plain)
        texts.add(tuple(plain[0, -30:].tolist()))
    assert len(texts) == 3


class EndsWith(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **options):
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("is_eos", [False, True])
def test_a_text_ends_within_a_draft_and_its_session_goes_on(is_eos):
    buddy, ids = tiny_buddy(), repeating()
    text = buddy.generate(ids, max_new_tokens=30, do_sample=False)[0, 15:].tolist()
    end = next(token for at, token in enumerate(text) if at > 3 and token not in text[:at])
    ending = {"eos_token_id": end} if is_eos else {"stopping_criteria": [EndsWith(end)]}
    made = []
    for drafts in (None, "ngram"):
        session = buddy.new_session(1, 64)
        out = buddy.generate(
            ids, cache=session, drafts=drafts, max_new_tokens=30, do_sample=False, **ending
        )
        more = torch.cat([out, random_ids(1, 3)], 1)
        again = buddy.generate(more, cache=session, drafts=drafts, max_new_tokens=5)
        lengths = [sequence.length for sequence in session.sequences.values()]
        made.append((out, again, session.get_seq_length(), lengths))
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    assert made[0][2:] == made[1][2:]


@engines
@pytest.mark.parametrize("budget", [None, ["3 blocks", "4 blocks", "5 blocks", 1.0]])
@pytest.mark.parametrize("ends", [None, 31])
def test_rows_that_are_drafted_for_go_on_at_their_own_speed(engine, budget, ends, monkeypatch):
    buddy, ids = tiny_buddy(engine=engine), repeating(4)
    ids[0, :4] = 0  # pads
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    counts = count_drafts(monkeypatch)
    options = {"attention_mask": mask, "budget": budget, "eos_token_id": ends, "pad_token_id": 0}
    if ends is not None:
        plain = buddy.generate(ids, max_new_tokens=30, do_sample=False, **options)
        options["eos_token_id"] = int(plain[1, 15 + 6])
    (plain, first), (drafted, second) = both(buddy, ids, **options)
    assert torch.equal(drafted, plain)
    assert first.finish_reasons == second.finish_reasons
    runs = [
        [[plan[row] for plan in plans(trace) if plan[row]] for row in range(4)]
        for trace in (first, second)
    ]
    assert runs[0] == runs[1]
    assert len({accepted for _, accepted in counts}) > 1, "some rows are faster than others"


def test_a_budget_drafts_where_no_ngram_does(monkeypatch):
    buddy, ids = tiny_buddy(policy="static:1,2,3"), random_ids(1, 9)
    monkeypatch.setattr(depth_drafts, "LEAST_CHANCE", 0.0)
    counts, made, original = count_drafts(monkeypatch), [], speculative._Writer.draft
    monkeypatch.setattr(
        speculative._Writer,
        "draft",
        lambda self, *rest: made.append(1) or original(self, *rest),
    )
    (plain, first), (drafted, second) = both(buddy, ids, budget="5 blocks", drafts="ngram+3 blocks")
    assert torch.equal(drafted, plain)
    assert plans(first) == plans(second)
    assert made
    assert counts


def test_kinds_of_drafts_are_read():
    assert read_drafts(None) == read_drafts("none") == Drafts()
    assert not Drafts()
    assert read_drafts("ngram") == Drafts(ngrams=True)
    half = read_drafts(0.5)
    assert half == read_drafts("50%") == Drafts(budget=half.budget)
    assert half.budget.blocks(6) == 3
    assert read_drafts("ngram+4 blocks").budget.blocks(6) == 4
    for wrong in ("NGRAM", "", "auto", "none+0.5", "ngram+auto", "ngram+", "+0.5", -1, 12, True):
        with pytest.raises(BudgetError, match=r'"none", "ngram", .* "12 blocks"') as refusal:
            read_drafts(wrong)
        assert str(refusal.value).endswith(f"got {wrong!r}")


def test_what_cannot_be_drafted_for_is_refused_by_name():
    buddy, ids = tiny_buddy(), repeating(2)
    buddy.thinking_marks = ThinkingMarks("A", "B", 90, 91)
    for options, words in (
        ({"do_sample": True}, "got do_sample"),
        ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor"),
        ({"thinking_tokens": 3}, "got thinking_tokens: leave it out"),
        ({"stopping_criteria": [EndsWith(3)]}, "EndsWith"),
        ({"batch_route": "shared"}, 'batch_route="shared"'),
        ({"cache": buddy.new_session(2, 32)}, "got cache"),
        ({"num_beams": 2}, "beams"),
        ({"draft_budget": 0.6}, "older name"),
    ):
        with pytest.raises(PolicyError, match=words):
            buddy.generate(ids, **{"max_new_tokens": 3, "drafts": "ngram"} | options)
    with pytest.raises(PolicyError, match="below the answer's 3 of 6 blocks, got 4"):
        buddy.generate(ids[:1], drafts="4 blocks", budget="3 blocks", max_new_tokens=3)
