"""Lossless decoding of one sequence: tokens are drafted, and verified together.

A few tokens are drafted, by what followed the last ones where they stood before, or by few blocks;
one pass over all of them says how many the text's own budget would have chosen, and adds one of
its own. It runs for each token what plain decoding runs. Drafts of few blocks share weights and
cache with it. Where they are an exit of a full pass, it goes on from there: it runs the other
blocks alone. Else what a draft has left in the cache is cut off, and written anew.

Source: the acceptance rule is that of speculative sampling (Leviathan et al., 2023); drafting by
the model's own first or routed blocks is that of LayerSkip, SWIFT and CLaSp.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessor

from buddy.budget.source import ConstantBudget
from buddy.depth.plan import DepthPlan
from buddy.engine.executors.blocks import PassRun
from buddy.engine.feed import Feed
from buddy.engine.run import run_step
from buddy.engine.state.sequence import RouteRow, SequenceState, gather_routes
from buddy.engine.state.session import Session, SessionState
from buddy.engine.step import Step, StepOutput, logits_of
from buddy.engine.stretch import Stretch, run_stretch
from buddy.engine.tokenwise import TokenwiseSteering, keep_tokens
from buddy.errors import PolicyError
from buddy.generation import depth_drafts
from buddy.generation.drafter import NgramDrafter
from buddy.generation.loop import Text, prefill_step, real_tokens
from buddy.generation.next_token import (
    FiniteLogits,
    best_and_chances,
    best_token,
    next_token,
    process,
)
from buddy.generation.payoff import MOST_DRAFTED, DraftCost

_UNLIKELY: Final = -1e30
"""Logit of the other words: of probability 0, unless a processor forbids all that are drafted."""

Chosen = tuple[Int[Tensor, " one"], Float[Tensor, "one vocab"]]
"""A token, and its scores."""


@torch.no_grad()
def speculative_loop(
    model: Any,
    input_ids: Int[Tensor, "one tokens"],
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    *,
    ngrams: bool,
    draft_blocks: int | None,
    **inputs: Any,
) -> Int[Tensor, "one columns"]:
    """Prefill, then drafts and verifications.

    N-grams draft where they pay, and `draft_blocks` where they do not; None = nothing does.
    """
    text = _DraftedText(input_ids, stopping_criteria, streamer)
    logits = prefill_step(model, input_ids, inputs)
    is_full = inputs["budget"][0] == ConstantBudget(model.num_blocks)
    # Adapters that know the depth make other residuals of a draft than of what verifies it.
    goes_on = model.policy.exits and is_full and model.depth_scales is None
    kind = _ExitWriter if goes_on else _Writer
    writer = kind(model, inputs, logits_processor, generation_config.do_sample, draft_blocks)
    scores = process(logits_processor, input_ids, logits)
    text.write([(next_token(scores, generation_config.do_sample), scores)])
    drafter = None
    if ngrams:
        drafter = NgramDrafter(*real_tokens(input_ids, inputs["attention_mask"]))
    cost, fed = DraftCost(), input_ids.shape[1]
    while not text.is_ended:
        most = min(MOST_DRAFTED, text.room - 1)
        drafted, proposed = text.ids[0, :0], list[Tensor]()
        started_s = perf_counter()
        if drafter is not None:
            for token in text.ids[0, fed:].tolist():
                drafter.add(token)
            fed = text.ids.shape[1]
            drafted = text.ids.new_tensor(drafter.draft(cost.of_token(1), most=most))
        if draft_blocks is not None and not len(drafted):
            writer.verify(text, *writer.draft(text.ids, most))
            continue
        written = writer.verify(text, drafted, proposed)
        if drafter is not None:
            drafter.judged(written - 1)
            cost.add(1, len(drafted), perf_counter() - started_s)
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
            f"a budget drafts with copies of the logits processors ({names}), and one cannot be "
            f'copied ({error}): leave the budget out of drafts, such as in drafts="ngram"'
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
        self,
        model: Any,
        inputs: dict[str, Any],
        processor: Any,
        do_sample: bool,
        blocks: int | None,
    ) -> None:
        self._model, self._processor, self._sample = model, processor, do_sample
        self._session: Session = inputs["cache"]
        (self._sequence_id,) = self._session.sequences
        self._draft_blocks = blocks or model.num_blocks
        self._trace = inputs["trace"]
        self._policy, self._executor = model.inference_policy(), model.executor.fast_path()
        self._num_logits = depth_drafts.num_words(self._executor, model.backbone.vocab)
        self._steering: TokenwiseSteering | None = None
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
            while here.shape[1] < columns + most and chance >= depth_drafts.LEAST_CHANCE:
                logits = self._next(here, here.shape[1] - columns)[-1:].float()
                if self._is_plain:
                    token, (sure,) = best_and_chances(logits)
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
    ) -> int:
        """Write the drafted tokens that the text's budget accepts, and one of its own.

        Args:
            text: So far.
            drafted: Tokens that may follow.
            proposed: What each was drawn from; none where they are no draws.

        Returns:
            How many were written.
        """
        before = self._session.state
        started_s = 0.0 if self._trace is None else self._trace.start(self._model.backbone.devices)
        fed = torch.cat([text.ids[:, -1:], drafted[None]], 1)
        try:
            logits, out = self._verified(fed)
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
            self._trace.record(out, started_s, tokens=1, rows=(0,), batch=1, kept=(written,))
        return written

    def _agreed(
        self,
        text: _DraftedText,
        drafted: Int[Tensor, " drafted"],
        logits: Float[Tensor, "tokens vocab"],
    ) -> Iterator[Chosen]:
        """Plain greedy decoding: up to the first place at which the best token is another."""
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
            if proposed:
                token, is_accepted = self._judge(drafted[place, None], proposed[place], scores)
            else:  # drawn as without drafts, so that a seed gives the same text
                token = next_token(scores, self._sample)
                is_accepted = bool(token == drafted[place])
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
        """Go on from what was written."""
        after = self._state_after(fed, tokens, before, out)
        if after is not None:
            keep_tokens(self._session, {self._sequence_id: after}, before.columns + tokens)

    def _state_after(
        self, fed: Int[Tensor, "one tokens"], tokens: int, before: SessionState, out: StepOutput
    ) -> SequenceState | None:
        """What the sequence carries on from the tokens that were written; None = what it has."""
        return None if self._steering is None else self._steering.after(0, tokens)

    def _next(self, here: Int[Tensor, "one columns"], drafted: int) -> Float[Tensor, "one vocab"]:
        """The draft's logits after the text so far, of which some tokens are drafted."""
        (sequence,) = self._session.find([self._sequence_id])
        sequence = replace(sequence, source=ConstantBudget(self._draft_blocks))
        return self._forward(here[:, -1:], sequence, num_logits=self._num_logits)[0]

    def _verified(
        self, fed: Int[Tensor, "one tokens"]
    ) -> tuple[Float[Tensor, "tokens vocab"], StepOutput]:
        """Logits after each token, as plain decoding makes them."""
        (sequence,) = self._session.find([self._sequence_id])
        self._steering = None
        if fed.shape[1] > 1:
            self._steering = TokenwiseSteering(self._policy, [sequence])
        return self._forward(fed, sequence, steering=self._steering)

    def _forward(
        self,
        token_ids: Int[Tensor, "one tokens"],
        sequence: SequenceState,
        *,
        num_logits: int | None = None,
        steering: TokenwiseSteering | None = None,
    ) -> tuple[Float[Tensor, "tokens vocab"], StepOutput]:
        step = Step(
            sequence_ids=[self._sequence_id],
            feed=Feed(token_ids=token_ids[0], counts=(token_ids.shape[1],)),
            sequences=[sequence],
            steering=steering,
            columns=token_ids.shape[1],
            num_logits=num_logits,
        )
        backbone = self._model.backbone
        out = run_step(backbone, self._policy, self._session, step, executor=self._executor)
        return logits_of(backbone, out, self._executor, num_logits=num_logits), out


class _ExitWriter(_Writer):
    """Drafts by the first blocks and verifies by the others, from the residuals at the exit.

    Of drafts that are none of its own, it computes all blocks. It is for texts of full depth.

    Source: LayerSkip (Elhoushi et al., 2024), section on self-speculative decoding.
    """

    _drafts: Sequence[StepOutput] = ()

    def _next(self, here: Int[Tensor, "one columns"], drafted: int) -> Float[Tensor, "one vocab"]:
        if not drafted:
            self._drafts = []
        exit_ = range(self._draft_blocks)
        out = self._stretch(here[0, -1:], drafted, exit_, num_logits=self._num_logits)
        self._drafts = [*self._drafts, out]
        return logits_of(self._model.backbone, out, num_logits=self._num_logits)

    def _verified(
        self, fed: Int[Tensor, "one tokens"]
    ) -> tuple[Float[Tensor, "tokens vocab"], StepOutput]:
        """Logits after each token.

        All but the last have run the first blocks, whose keys and values still stand in slots that
        are not committed; nobody has written there since.
        """
        if not self._drafts:
            return super()._verified(fed)
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

    def _state_after(
        self, fed: Int[Tensor, "one tokens"], tokens: int, before: SessionState, out: StepOutput
    ) -> SequenceState | None:
        """What the sequence carries on; the policy is shown what was written alone."""
        if not self._drafts:
            return super()._state_after(fed, tokens, before, out)
        self._drafts = ()
        session, policy = self._session, self._policy
        old = before.sequences[self._sequence_id]
        seen = PassRun(out.lanes, session.kv, fed[0]).observe(policy.context_layer).first(tokens)
        route = policy.observe(None if old.route is None else gather_routes([old.route]), seen)
        return replace(
            old,
            length=old.length + tokens,
            steps=old.steps + tokens,
            block_mask=out.plan.host[tokens - 1],
            blocks=self._model.num_blocks,
            executed=old.executed + int(out.executed[:tokens].sum()),
            route=RouteRow(route, 0, 1),
        )

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
