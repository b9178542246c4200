"""Log-likelihoods of candidate answers under one plan a question, chosen from its context."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.budget.source import BudgetSource
from buddy.depth.policy import Policy
from buddy.engine.feed import Feed
from buddy.engine.run import run_step
from buddy.engine.state.cache import KVPolicy
from buddy.engine.state.session import Session
from buddy.engine.step import Step, StepOutput
from buddy.errors import DataError
from buddy.model import BuddyForCausalLM

_HEAD_TOKENS = 256
"""Positions whose logits are held at once: the vocabulary is wide."""

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Question:
    """Candidates that share one plan.

    Attributes:
        routed: Tokens that every candidate begins with, and all that the route sees.
        rests: Of each candidate, the tokens that follow and are fed: all but the last one.
        answers: Of each candidate, the tokens whose likelihood is asked, the last of which is
            not fed.
    """

    routed: Tokens
    rests: tuple[Tokens, ...]
    answers: tuple[Tokens, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """What came out for one question.

    Attributes:
        loglikelihoods: Of each candidate's answer, summed over its tokens.
        greedy: Whether each answer is what greedy decoding would have given.
        blocks: The plan.
    """

    loglikelihoods: tuple[float, ...]
    greedy: tuple[bool, ...]
    blocks: tuple[int, ...]


def ask(candidates: Sequence[tuple[Tokens, Tokens]], *, context: int) -> list[Question]:
    """Questions for the candidates (context, answer) of one document.

    The route sees the tokens that all contexts begin with, and no more: where a candidate stands
    in the context (WinoGrande), it does not reach the route either. Contexts that have no token
    in common become questions of their own, each routed from its own context.

    Args:
        candidates: Token ids; neither part is empty.
        context: Most tokens that the model can be fed. Contexts that are too long lose as much of
            their beginning as the longest candidate needs, so that all still begin alike.

    Raises:
        DataError: An answer is so long that no token of its context can be fed with it.
    """
    lost = max(_overflows(candidates, context))
    shared = _common([before for before, _ in candidates])
    if shared <= lost:
        return [question for own in candidates for question in ask([own], context=context)]
    return [
        Question(
            candidates[0][0][lost:shared],
            tuple((*before[shared:], *answer[:-1]) for before, answer in candidates),
            tuple(answer for _, answer in candidates),
        )
    ]


def ask_leaking(candidates: Sequence[tuple[Tokens, Tokens]], *, context: int) -> list[Question]:
    """Questions whose route sees the answer too: only to reproduce harnesses that leak.

    Raises:
        DataError: As `ask`.
    """
    return [
        Question((*before[lost:], *answer[:-1]), ((),), (answer,))
        for (before, answer), lost in zip(candidates, _overflows(candidates, context), strict=True)
    ]


def _overflows(candidates: Sequence[tuple[Tokens, Tokens]], context: int) -> list[int]:
    """How many tokens of its context each candidate has to lose, so that its answer is fed whole.

    Source: lm-evaluation-harness, `hf` class: it cuts on the left, never into an answer.
    """
    for place, (_, answer) in enumerate(candidates, start=1):
        if len(answer) > context:  # all but the answer's last token are fed, after one at least
            raise DataError(
                f"answer {place} of {len(candidates)} has {len(answer)} tokens, but the model's "
                f"context holds {context}: shorten the answer or take a model of longer context"
            )
    return [max(0, len(before) + len(answer) - 1 - context) for before, answer in candidates]


def _common(contexts: Sequence[Tokens]) -> int:
    """How many tokens all contexts begin with."""
    count = 0
    for column in zip(*contexts, strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


@torch.inference_mode()
def score(
    model: BuddyForCausalLM,
    policy: Policy,
    source: BudgetSource | None,
    questions: Sequence[Question],
    kv_policy: KVPolicy | None = None,
) -> list[Scored]:
    """Run a batch of questions: each context once, then every candidate from its cache.

    Args:
        model: Runs the blocks.
        policy: Chooses them.
        source: Says how many, for every question: of its context, which is the prompt, and of what
            follows. None lets the predictor choose for each, from what its route sees.
        questions: Any number; those of like length waste least.
        kv_policy: What a skipped block leaves in its KV cache; the model's own if not given.
    """
    session = model.new_session(len(questions), 1, kv_policy)
    contexts = [question.routed for question in questions]
    sources = _sources(model, source, contexts)
    numbers = [session.join(each, reroute="prefill") for each in sources]
    out = _feed(model, policy, session, numbers, contexts)
    plans = out.last_plan.executed_sets
    hidden = [out.hidden]
    owners = [place for place, question in enumerate(questions) for _ in question.rests]
    # Of each candidate, the lanes of what it was fed, in the order of its tokens.
    fed = [list(range(out.lanes.first[o], out.lanes.last[o] + 1)) for o in owners]
    rests = [rest for question in questions for rest in question.rests]
    longer = [place for place, rest in enumerate(rests) if rest]
    if longer:
        session.reorder_cache(torch.tensor(owners))
        numbers = list(session.sequences)
        after = _feed(
            model, policy, session, [numbers[at] for at in longer], [rests[at] for at in longer]
        )
        hidden.append(after.hidden)
        for place, first, last in zip(longer, after.lanes.first, after.lanes.last, strict=True):
            fed[place] += range(out.lanes.num + first, out.lanes.num + last + 1)
    answers = [answer for question in questions for answer in question.answers]
    scores = iter(_read(model, torch.cat(hidden), fed, answers))
    scored = []
    for question, plan in zip(questions, plans, strict=True):
        mine = [next(scores) for _ in question.rests]
        scored.append(Scored(tuple(ll for ll, _ in mine), tuple(top for _, top in mine), plan))
    return scored


def _sources(
    model: BuddyForCausalLM, source: BudgetSource | None, contexts: Sequence[Tokens]
) -> tuple[BudgetSource, ...]:
    """The same for every context, or what the predictor chooses for each."""
    if source is not None:
        return (source,) * len(contexts)
    ids, valid = side_by_side(contexts, model.device)
    return model.choose_sources((None,) * len(contexts), ids, valid, valid)


def side_by_side(
    sequences: Sequence[Tokens], device: torch.device
) -> tuple[Int[Tensor, "batch tokens"], Bool[Tensor, "batch tokens"]]:
    """Token ids, padded on the right, and which of them are no pads."""
    lengths = torch.tensor([len(tokens) for tokens in sequences])
    valid = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.zeros(valid.shape, dtype=torch.long)
    ids[valid] = torch.tensor([token for tokens in sequences for token in tokens])
    return ids.to(device), valid.to(device)


def _feed(
    model: BuddyForCausalLM,
    policy: Policy,
    session: Session,
    numbers: Sequence[int],
    sequences: Sequence[Tokens],
) -> StepOutput:
    ids = torch.tensor([token for tokens in sequences for token in tokens], device=model.device)
    feed = Feed(token_ids=ids, counts=tuple(map(len, sequences)))
    return run_step(model.backbone, policy, session, Step(sequence_ids=numbers, feed=feed))


def _read(
    model: BuddyForCausalLM,
    hidden: Float[Tensor, "lanes hidden"],
    fed: Sequence[Sequence[int]],
    answers: Sequence[Tokens],
) -> list[tuple[float, bool]]:
    """Each answer's summed log-likelihood, and whether it is the likeliest, token by token."""
    before = [
        lane for lanes, answer in zip(fed, answers, strict=True) for lane in lanes[-len(answer) :]
    ]
    targets = torch.tensor([t for answer in answers for t in answer], device=hidden.device)
    logprobs, likeliest = token_logprobs(model, hidden[before], targets)
    lengths = [len(answer) for answer in answers]
    parts = zip(torch.split(logprobs, lengths), torch.split(likeliest, lengths), strict=True)
    return [(float(part.sum()), bool(top.all())) for part, top in parts]


def token_logprobs(
    model: BuddyForCausalLM,
    hidden: Float[Tensor, "tokens hidden"],
    targets: Int[Tensor, " tokens"],
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """Each target's log-probability in float32, and whether it is the likeliest token."""
    logprobs, likeliest = [], []
    pieces = (torch.split(whole, _HEAD_TOKENS) for whole in (hidden, targets))
    for part, target in zip(*pieces, strict=True):
        logits = model.backbone.logits(part).float()
        chosen = logits.gather(1, target[:, None])[:, 0]
        logprobs.append(chosen - logits.logsumexp(1))
        likeliest.append(logits.argmax(1) == target)
    return torch.cat(logprobs), torch.cat(likeliest)
