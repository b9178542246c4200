"""Lossless decoding with one model: drafted at a low budget, verified at the asked one.

A few tokens are drafted by few blocks; one pass at the asked budget over all of them says how many
it would have chosen itself, and adds one of its own. Drafts and verification share weights and
cache. Where the drafts are an exit, the verification goes on from it: it runs the other blocks
alone. Else what a draft has left in the cache is cut off, and written anew by the verification.

Source: the acceptance rule is that of speculative sampling (Leviathan et al., 2023); drafting by
the model's own first or routed blocks is that of LayerSkip, SWIFT and CLaSp.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessor

from buddy.budget.source import BudgetSource, ConstantBudget
from buddy.depth.plan import DepthPlan
from buddy.engine.executors.blocks import PassRun
from buddy.engine.feed import Feed
from buddy.engine.run import run_step
from buddy.engine.state.sequence import RouteRow, gather_routes
from buddy.engine.state.session import Session, SessionState
from buddy.engine.steer import FixedPlanSteering
from buddy.engine.step import Step, StepOutput, logits_of
from buddy.engine.stretch import Stretch, run_stretch
from buddy.errors import PolicyError
from buddy.generation.loop import Text, prefill_step
from buddy.generation.next_token import (
    FiniteLogits,
    best_and_chance,
    best_token,
    next_token,
    process,
)

_LONGEST_DRAFT: Final = 8
_DRAFTED_WORDS: Final = 0.25
"""The share of the token ids that drafts are made of, where an executor saves by it. Byte-pair
encodings number frequent tokens first (SmolLM2's first quarter has 90 % of the tokens of Alpaca's
answers), and the output projection is a third of a draft's work in a small model."""
_UNLIKELY: Final = -1e30
"""Logit of the other words: of probability 0, unless a processor forbids all that are drafted."""
_LEAST_CHANCE: Final = 0.5
"""A draft ends where the product of its tokens' highest probabilities falls below.

In greedy decoding it estimates the chance that all of them are accepted; a token that is likely to
be thrown away is not worth drafting.
"""

Chosen = tuple[Int[Tensor, " one"], Float[Tensor, "one vocab"]]
"""A token, and the scores that it was chosen by."""


def check_speculation(batch: int, source: BudgetSource, num_blocks: int, draft: int) -> None:
    """Refuse what cannot be drafted for.

    Raises:
        PolicyError: Several rows, a reduced budget, or a draft that saves nothing.
    """
    if batch != 1:
        raise PolicyError(f"draft_budget is for one sequence at a time, got a batch of {batch}")
    if source != ConstantBudget(num_blocks):
        each = getattr(source, "each", None)
        what = "not one number" if each is None else f"{each} of {num_blocks} blocks"
        raise PolicyError(
            f"draft_budget verifies at full depth, and the budget is {what}: leave the budget out"
        )
    if draft >= num_blocks:
        raise PolicyError(f"draft_budget must be below the model's {num_blocks} blocks")


@torch.no_grad()
def speculative_loop(
    model: Any,
    input_ids: Int[Tensor, "one tokens"],
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    *,
    draft_blocks: int,
    **inputs: Any,
) -> Int[Tensor, "one columns"]:
    """Prefill, then drafts and verifications."""
    text = _DraftedText(input_ids, stopping_criteria, streamer)
    logits = prefill_step(model, input_ids, inputs)
    kind = _ExitWriter if model.policy.exits else _Writer
    writer = kind(model, inputs, logits_processor, generation_config.do_sample, draft_blocks)
    scores = process(logits_processor, input_ids, logits)
    text.write([(next_token(scores, generation_config.do_sample), scores)])
    while not text.is_ended:
        drafted, proposed = writer.draft(text.ids, min(_LONGEST_DRAFT, text.room - 1))
        writer.verify(text, drafted, proposed)
    return text.end()


def _copied(processors: Sequence[LogitsProcessor]) -> Sequence[LogitsProcessor]:
    """Copies of processors, whose state of the text may go another way.

    Raises:
        PolicyError: One cannot be copied.
    """
    try:
        return copy.deepcopy(processors)
    except Exception as error:
        names = ", ".join(type(processor).__name__ for processor in processors)
        raise PolicyError(
            f"draft_budget drafts with copies of the logits processors ({names}), and one cannot "
            f"be copied ({error}): leave draft_budget out"
        ) from error


class _DraftedText(Text):
    """Text of one sequence, which is written several tokens at a time."""

    is_ended = False

    def write(self, chosen: Iterable[Chosen]) -> int:
        """Append tokens up to one that ends the text; returns how many they were."""
        count = 0
        for token, scores in chosen:
            count += 1
            if self.add(token, scores):
                self.is_ended = True
                break
        return count


class _Writer:
    """Drafts and verifies on one session, whose one sequence has had its prompt."""

    def __init__(
        self, model: Any, inputs: dict[str, Any], processor: Any, do_sample: bool, blocks: int
    ) -> None:
        self._model, self._processor, self._sample = model, processor, do_sample
        self._session: Session = inputs["cache"]
        (self._sequence_id,) = self._session.sequences
        self._draft_blocks, self._draft_budget = blocks, ConstantBudget(blocks)
        self._full_budget = ConstantBudget(model.num_blocks)
        self._trace = inputs["trace"]
        self._policy, self._executor = model.inference_policy(), model.executor.fast_path()
        vocab = model.backbone.vocab
        saves = self._executor is not None and self._executor.makes_some_logits
        self._num_logits = math.ceil(vocab * _DRAFTED_WORDS) if saves else vocab
        self._is_plain = not do_sample and all(isinstance(rule, FiniteLogits) for rule in processor)

    def draft(
        self, ids: Int[Tensor, "one columns"], most: int
    ) -> tuple[Int[Tensor, " drafted"], list[Tensor]]:
        """Tokens after `ids`, and what each was drawn from; the session stays as it was.

        Plain greedy decoding does not ask what they were drawn from.
        """
        before = self._session.state
        # Some processors keep a state of the text, and drafts are no text yet.
        processor = self._processor if self._is_plain else _copied(self._processor)
        proposed: list[Tensor] = []
        here, columns, chance = ids, ids.shape[1], 1.0
        try:
            while here.shape[1] < columns + most and chance >= _LEAST_CHANCE:
                logits = self._next(here, here.shape[1] - columns)[-1:].float()
                if self._is_plain:
                    token, sure = best_and_chance(logits)
                else:
                    others = self._model.backbone.vocab - self._num_logits
                    logits = torch.nn.functional.pad(logits, (0, others), value=_UNLIKELY)
                    scores = process(processor, here, logits)
                    proposed.append(scores)
                    token, sure = next_token(scores, self._sample), float(scores.softmax(-1).max())
                chance *= sure
                here = torch.cat([here, token[None]], 1)
        finally:
            self._session.rewind(before)
        return here[0, columns:], proposed

    def verify(
        self, text: _DraftedText, drafted: Int[Tensor, " drafted"], proposed: list[Tensor]
    ) -> None:
        """Write the drafted tokens that full depth accepts, and one of its own."""
        before = self._session.state
        started_s = 0.0 if self._trace is None else self._trace.clock()
        fed = torch.cat([text.ids[:, -1:], drafted[None]], 1)
        try:
            logits, out = self._full(fed)
            if self._is_plain:
                chosen = self._agreed(text, drafted, logits.float())
            else:
                chosen = self._judged(text, drafted, proposed, logits)
            written = text.write(chosen)
            self._keep(fed, written, before, out)
        except BaseException:
            self._session.rewind(before)
            raise
        if self._trace is not None:
            self._trace.record(out, started_s, tokens=written, rows=(0,), batch=1, of_lanes=written)

    def _agreed(
        self,
        text: _DraftedText,
        drafted: Int[Tensor, " drafted"],
        logits: Float[Tensor, "tokens vocab"],
    ) -> Iterator[Chosen]:
        """Plain greedy decoding: up to the first place at which full depth's best is another."""
        best = best_token(process(self._processor, text.ids, logits))
        num_agreed = int((best[:-1] == drafted).cumprod(0).sum())
        for place in range(num_agreed + 1):
            yield best[place, None], logits[place, None]

    def _judged(
        self,
        text: _DraftedText,
        drafted: Int[Tensor, " drafted"],
        proposed: list[Tensor],
        logits: Float[Tensor, "tokens vocab"],
    ) -> Iterator[Chosen]:
        """A token at a time, written before the next: processors read the text."""
        for place in range(len(drafted)):
            scores = process(self._processor, text.ids, logits[place, None].float())
            token, is_accepted = self._judge(drafted[place, None], proposed[place], scores)
            yield token, scores
            if not is_accepted:
                return
        scores = process(self._processor, text.ids, logits[-1:].float())
        yield next_token(scores, self._sample), scores

    def _judge(self, token: Tensor, proposed: Tensor, scores: Tensor) -> tuple[Tensor, bool]:
        """Speculative sampling: what comes out is distributed as full depth alone would draw it."""
        if not self._sample:
            best = scores.argmax(-1)
            return best, bool(best == token)
        draft, full = proposed.softmax(-1)[0], scores.softmax(-1)[0]
        if bool(torch.rand(()) * draft[token] < full[token]):
            return token, True
        rest = (full - draft).clamp(min=0)
        return torch.multinomial(rest / rest.sum(), 1), False

    def _keep(
        self, fed: Int[Tensor, "one tokens"], tokens: int, before: SessionState, out: StepOutput
    ) -> None:
        """Go on from what was written: the policy is shown just that."""
        session, policy, sequence_id = self._session, self._policy, self._sequence_id
        old = before.sequences[sequence_id]
        seen = PassRun(out.lanes, session.kv, fed[0]).observe(policy.context_layer).first(tokens)
        route = policy.observe(None if old.route is None else gather_routes([old.route]), seen)
        after = replace(
            old,
            length=old.length + tokens,
            steps=old.steps + 1,
            block_mask=out.plan.host[tokens - 1],
            blocks=self._model.num_blocks,
            executed=old.executed + int(out.executed[:tokens].sum()),
            route=RouteRow(route, 0, 1),
        )
        session.rewind(SessionState({sequence_id: after}, before.columns + tokens))

    def _next(self, here: Int[Tensor, "one columns"], drafted: int) -> Float[Tensor, "one vocab"]:
        """The draft's logits after the text so far, of which some tokens are drafted."""
        return self._forward(here[:, -1:], self._draft_budget, self._num_logits)[0]

    def _full(
        self, fed: Int[Tensor, "one tokens"]
    ) -> tuple[Float[Tensor, "tokens vocab"], StepOutput]:
        """Full depth's logits after each token.

        The policy is not asked: `_keep` shows it what is written.
        """
        plan = DepthPlan.full(fed.shape[1], self._model.num_blocks, fed.device)
        return self._forward(fed, self._full_budget, steering=FixedPlanSteering(plan))

    def _forward(
        self,
        token_ids: Int[Tensor, "one tokens"],
        budget: ConstantBudget,
        num_logits: int | None = None,
        steering: FixedPlanSteering | None = None,
    ) -> tuple[Float[Tensor, "tokens vocab"], StepOutput]:
        (sequence,) = self._session.find([self._sequence_id])
        step = Step(
            sequence_ids=[self._sequence_id],
            feed=Feed(token_ids=token_ids[0], counts=(token_ids.shape[1],)),
            sequences=[replace(sequence, source=budget)],
            steering=steering,
            columns=token_ids.shape[1],
            num_logits=num_logits,
        )
        backbone = self._model.backbone
        out = run_step(backbone, self._policy, self._session, step, executor=self._executor)
        return logits_of(backbone, out, num_logits=num_logits), out


class _ExitWriter(_Writer):
    """Drafts by the first blocks and verifies by the others, from the residuals at the exit.

    Source: LayerSkip (Elhoushi et al., 2024), section on self-speculative decoding.
    """

    _drafts: list[StepOutput]

    def draft(
        self, ids: Int[Tensor, "one columns"], most: int
    ) -> tuple[Int[Tensor, " drafted"], list[Tensor]]:
        """Tokens after `ids`, and what each was drawn from; nothing is committed."""
        self._drafts = []
        return super().draft(ids, most)

    def _next(self, here: Int[Tensor, "one columns"], drafted: int) -> Float[Tensor, "one vocab"]:
        exit_ = range(self._draft_blocks)
        out = self._stretch(here[0, -1:], drafted, exit_, num_logits=self._num_logits)
        self._drafts.append(out)
        return logits_of(self._model.backbone, out, num_logits=self._num_logits)

    def _full(
        self, fed: Int[Tensor, "one tokens"]
    ) -> tuple[Float[Tensor, "tokens vocab"], StepOutput]:
        """Full depth's logits after each token.

        All but the last have run the first blocks, whose keys and values still stand in slots that
        are not committed; nobody has written there since.
        """
        if not self._drafts:
            return super()._full(fed)
        num_blocks, exit_ = self._model.num_blocks, self._draft_blocks
        tokens = fed.shape[1]
        # The last drafted token predicts no draft, so it has not run yet.
        last = self._stretch(fed[0, -1:], tokens - 1, range(exit_), num_logits=0)
        first = [*self._drafts, last]
        hidden = torch.cat([out.hidden for out in first])
        rest = self._stretch(fed[0], 0, range(exit_, num_blocks), hidden=hidden)
        executed = torch.cat([out.executed for out in first]) + rest.executed
        plan = DepthPlan.full(tokens, num_blocks, fed.device)
        out = replace(rest, plan=plan, executed=executed)
        return logits_of(self._model.backbone, out), out

    def _stretch(
        self,
        token_ids: Int[Tensor, " tokens"],
        place: int,
        blocks: range,
        *,
        num_logits: int | None = None,
        hidden: Float[Tensor, "tokens hidden"] | None = None,
    ) -> StepOutput:
        """A stretch of blocks for tokens that stand `place` slots after what is committed."""
        (sequence,) = self._session.find([self._sequence_id])
        stretch = Stretch(
            sequence=replace(sequence, length=sequence.length + place),
            token_ids=token_ids,
            blocks=blocks,
            hidden=hidden,
            num_logits=num_logits,
        )
        return run_stretch(self._model.backbone, self._session, stretch, self._executor)
