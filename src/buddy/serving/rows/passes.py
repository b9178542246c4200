"""A pass: the last token of every row that decodes and parts of prompts, fed in one step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.budget.source import ConstantBudget
from buddy.depth.plan import on_device
from buddy.depth.policy import Policy
from buddy.engine.clock import clock_of
from buddy.engine.executors.protocol import Executor
from buddy.engine.feed import Feed
from buddy.engine.run import run_step
from buddy.engine.state.lanes import Lanes
from buddy.engine.state.session import Session
from buddy.engine.steer import BatchRoute
from buddy.engine.step import Step, StepOutput, logits_of
from buddy.engine.tokenwise import TokenwiseSteering, keep_tokens
from buddy.inference import InferenceModel
from buddy.serving.control.protocol import StepReport, prompt_weight
from buddy.serving.request import GenerationRequest
from buddy.serving.rows.drafts import NO_DRAFTS, Drafts, SurvivedPasses
from buddy.serving.rows.row import Row
from buddy.serving.rows.scoring import TOGETHER, PromptScorer


@dataclass(frozen=True, slots=True)
class Pass:
    """Who takes part.

    Attributes:
        decoding: Rows that have their last token fed.
        parts: Rows that have some of their prompt fed, and how many tokens of it.
        drafts: What is fed after the last tokens of some; none beside parts of prompts.
    """

    decoding: list[Row]
    parts: list[tuple[Row, int]]
    drafts: Drafts = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """All of them, in the order of their lanes."""
        return self.decoding + [row for row, _ in self.parts]

    @property
    def counts(self) -> tuple[int, ...]:
        """New tokens of each row."""
        fed = (1 + len(self.drafted(row)) for row in self.decoding)
        return (*fed, *(count for _, count in self.parts))

    def drafted(self, row: Row) -> Sequence[int]:
        """Tokens that are drafted for a row."""
        return self.drafts.get(row.number, ())

    def without_gone(self) -> "Pass":
        """The same without rows whose requests were let go meanwhile."""
        return self._of(
            [row for row in self.decoding if not row.is_gone],
            [part for part in self.parts if not part[0].is_gone],
        )

    def apart(self) -> list["Pass"]:
        """The rows without a seed together, and each with one by itself."""
        rest = self._of(
            [row for row in self.decoding if not row.is_seeded],
            [part for part in self.parts if not part[0].is_seeded],
        )
        seeded = [self._of([row], []) for row in self.decoding if row.is_seeded]
        seeded += [self._of([], [part]) for part in self.parts if part[0].is_seeded]
        return [rest, *seeded] if rest.rows else seeded

    def halves(self) -> tuple["Pass", "Pass"]:
        """Two of which each has some of the rows; of both kinds, each has one kind."""
        if self.decoding and self.parts:
            return self._of(self.decoding, []), self._of([], self.parts)
        decoding, parts = len(self.decoding) // 2, len(self.parts) // 2
        return (
            self._of(self.decoding[:decoding], self.parts[:parts]),
            self._of(self.decoding[decoding:], self.parts[parts:]),
        )

    def _of(self, decoding: list[Row], parts: list[tuple[Row, int]]) -> "Pass":
        """Some of the rows."""
        return replace(self, decoding=decoding, parts=parts)


@dataclass(frozen=True, slots=True)
class Ran:
    """A pass that has run.

    Attributes:
        members: Who took part.
        out: What it returned.
        measured: Says what it took. It is for a GPU known when the tokens have been read: ask then,
            or it is waited for.
        steering: Of a pass with drafts; None = of another.
    """

    members: Pass
    out: StepOutput
    measured: Callable[[], StepReport]
    steering: TokenwiseSteering | None


_TOGETHER: Final = 16
"""Tokens of a prompt that the kernel attends together, if a pass has as many of them."""
LEAST_CUT: Final = 2 * _TOGETHER
"""Tokens of a prompt with a seed below which it is not cut."""
_ALONE: Final = 64
"""Tokens of a part of a prompt with a seed, where no pass is steady."""


def cut(tokens: int, at: int) -> int:
    """Where a prompt with a seed may be cut, at or before a place: its numbers stay what they are.

    The kernel attends 16 tokens at a time in other orders of sums than fewer, so each part has
    whole sixteens, and none has fewer.
    """
    return tokens if at >= tokens else max(0, min(at, tokens - _TOGETHER) // _TOGETHER * _TOGETHER)


class PassRunner:
    """Runs passes on one session.

    Args:
        model: Its weights and its policy must not change while it is in use.
        session: Has the sequences of the rows.
        batch_route: Whose scores rank the blocks of a pass.
    """

    def __init__(self, model: InferenceModel, session: Session, batch_route: BatchRoute) -> None:
        self._backbone: Backbone = model.backbone
        with torch.no_grad():
            model.executor.refresh()
            self.policy: Policy = model.inference_policy()
        self._executor = model.executor.fast_path()
        self._clock = clock_of(self._backbone.device)
        self._session, self._batch_route = session, batch_route
        steady = self._executor if self.policy.plans_ahead else None
        self.steady_lanes = 0 if steady is None else steady.steady_lanes
        """Tokens of a pass in which a seed holds in company; 0 = none."""
        self.head_blocks = head_blocks(self._backbone)

    def weight(self, row: Row) -> float:
        """Weigh a token of a row's prompt, as `prompt_weight` does."""
        return prompt_weight(row.request, row.depth, self.head_blocks)

    def prompt_tokens(self, request: GenerationRequest) -> float:
        """Tokens of a request's prompt, each by its weight."""
        weight = prompt_weight(request, request.budget.prompt, self.head_blocks)
        return weight * len(request.prompt)

    def part(self, row: Row, left: float) -> int:
        """Tokens of a row's prompt that are fed next, of as many as may be.

        A prompt whose plan is not known ahead is fed whole. Numbers of one with a seed must not
        depend on how much was left of a pass: see `cut`. They may be a few more than are left.

        Args:
            row: Has a prompt to be fed.
            left: Tokens that may be, of prompts that are not scored.
        """
        left = max(1, int(left / self.weight(row)))
        if row.planned is None:
            return row.prompt_left
        if not row.is_seeded:
            return min(left, row.prompt_left)
        if not self.steady_lanes:
            return min(_ALONE - row.num_fed % _ALONE, row.prompt_left)
        stop = cut(len(row.prompt), row.num_fed + min(left, self.steady_lanes))
        if stop > row.num_fed:
            return stop - row.num_fed
        return _TOGETHER if row.prompt_left >= LEAST_CUT else row.prompt_left

    def divide(
        self, decoding: list[Row], parts: list[tuple[Row, int]], drafts: Drafts = NO_DRAFTS
    ) -> list[Pass]:
        """All in one pass where the fast path takes it; else prompts in passes of their own.

        The general path pads all sequences of a pass to the longest. A row with a seed is in a pass
        with others where its numbers are what they are without them.
        """
        whole = Pass(decoding, parts, drafts)
        passes = [whole] if self.steady_lanes else whole.apart()
        passes = [small for large in passes for small in self._fitting(large)]
        return [
            small
            for large in passes
            for small in ([large] if sum(large.counts) <= self.steady_lanes else large.apart())
        ]

    def _fitting(self, whole: Pass) -> list[Pass]:
        if len(whole.rows) == 1 or not whole.parts or self._fits(whole):
            return [whole]
        alone = [Pass([], [part]) for part in whole.parts]
        return [Pass(whole.decoding, []), *alone] if whole.decoding else alone

    def _fits(self, whole: Pass) -> bool:
        mixes_seeds = self.steady_lanes > 0 and any(row.is_seeded for row in whole.rows)
        if mixes_seeds and sum(whole.counts) > self.steady_lanes:
            return False
        return fits_one_pass(self._executor, [row.num_fed for row in whole.rows], whole.counts)

    def run(self, members: Pass) -> Ran:
        """Run a pass, and note in its rows what they were fed and what ran for it.

        Of a row that is drafted for, its last token alone is noted: what was drafted is for the
        caller to judge, with `take` and `keep`.
        """
        started = self._clock.mark()
        step = self._step(members)
        out = run_step(self._backbone, self.policy, self._session, step, executor=self._executor)
        steering = step.steering if isinstance(step.steering, TokenwiseSteering) else None
        scored = 0
        for place, row in enumerate(members.rows):
            count, last = out.lanes.counts[place], int(out.lanes.last[place])
            if steering is not None:
                count, last = 1, last - len(members.drafted(row))
            if row.scorer is not None:
                scored += self._score(row.scorer, out, last + 1 - count, count)
            _note_fed(row, out, last, count)
        ended = self._clock.mark()

        def measured() -> StepReport:
            seconds = self._clock.seconds(started, ended)
            return _measured(len(members.decoding), out, seconds, scored * self.head_blocks)

        return Ran(members, out, measured, steering)

    def take(self, ran: Ran, row: Row, lane: int) -> None:
        """Note that a row goes on with a token that was drafted, and was fed in this lane."""
        _note_fed(row, ran.out, lane, 1)

    def keep(self, ran: Ran, tokens: Sequence[int]) -> None:
        """Take back what was drafted and is not gone on with.

        Args:
            ran: A pass with drafts.
            tokens: That each of its rows keeps.
        """
        assert ran.steering is not None
        after = {
            row.sequence: ran.steering.after(place, count)
            for place, (row, count) in enumerate(zip(ran.members.rows, tokens, strict=True))
            if row.sequence is not None
        }
        keep_tokens(self._session, after)

    def shallow_passes(self) -> SurvivedPasses:
        """Passes of few blocks over the same rows, which draft."""
        return SurvivedPasses(
            self._backbone, self.policy, self._session, self._executor, self._batch_route
        )

    def try_one(self) -> None:
        """Feed a token of nobody's, which fails where the engine can serve nobody any more."""
        number = self._session.join()
        try:
            token = torch.zeros(1, dtype=torch.long, device=self._backbone.device)
            step = Step(sequence_ids=[number], feed=Feed(token_ids=token, counts=(1,)))
            run_step(self._backbone, self.policy, self._session, step, executor=self._executor)
        finally:
            self._session.leave(number)

    def _step(self, members: Pass) -> Step:
        tokens: list[int] = []
        for row in members.decoding:
            tokens += row.last, *members.drafted(row)
        for row, count in members.parts:
            tokens += row.prompt[row.num_fed : row.num_fed + count].tolist()
        rows = members.rows
        sequence_ids = [row.sequence for row in rows if row.sequence is not None]
        sequences = self._session.find(sequence_ids)
        for place, row in enumerate(members.decoding):
            state = sequences[place]
            if row.budget_source is not None:
                if state.source is not row.budget_source:
                    sequences[place] = replace(state, source=row.budget_source)
            elif state.source.each != row.depth:  # type: ignore[attr-defined]  # `join` gave it
                sequences[place] = replace(state, source=ConstantBudget(row.depth))
        prompts = {
            row.sequence: row.planned
            for row, _ in members.parts
            if row.sequence is not None and row.planned is not None
        }
        alone = [place for place, row in enumerate(rows) if row.is_seeded]
        steering = None
        if any(map(members.drafted, members.decoding)):
            steering = TokenwiseSteering(self.policy, sequences, self._batch_route, alone)
        are_prompts = (False,) * len(members.decoding) + (True,) * len(members.parts)
        return Step(
            sequence_ids=sequence_ids,
            feed=Feed(
                token_ids=on_device(np.array(tokens, np.int64), self._backbone.device),
                counts=members.counts,
                prompts=are_prompts if members.parts else None,
            ),
            sequences=sequences,
            batch_route=self._batch_route,
            planned_prompts=prompts,
            routed_alone=[sequence_ids[place] for place in alone],
            steering=steering,
        )

    def _score(self, scorer: PromptScorer, out: StepOutput, first: int, count: int) -> int:
        """Score what the lanes of a part of a prompt predict; what fails is its request's alone.

        Returns:
            Lanes whose logits were asked for.
        """
        stop = first + min(count, scorer.left)
        try:
            for at in range(first, stop, TOGETHER):
                scorer.take(self.logits(out, np.arange(at, min(at + TOGETHER, stop))))
        except BaseException as error:
            scorer.failure = error
        return stop - first

    def logits(self, out: StepOutput, lanes: NDArray[np.int64]) -> Float[Tensor, "rows vocab"]:
        """Logits of these lanes alone."""
        is_all = len(lanes) == out.lanes.num
        which = slice(None) if is_all else on_device(lanes, out.hidden.device)
        if out.logits is not None:
            return out.logits[which]
        return logits_of(self._backbone, out, self._executor, hidden=out.hidden[which])


def _note_fed(row: Row, out: StepOutput, last: int, count: int) -> None:
    """Note in a row that it was fed so many tokens, up to this lane, and what ran for them."""
    if not row.prompt_left:
        row.ran.append(out.plan.host[last])
    row.note_fed(count, int(out.executed[last + 1 - count : last + 1].sum()))


def head_blocks(backbone: Backbone) -> float:
    """How many blocks have as many weights as the output projection, in whatever format they are.

    Of a mixture all experts count, though a token runs a few: it is too little then.
    """

    def size(module: torch.nn.Module) -> int:
        return sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))

    return backbone.num_blocks * size(backbone.head) / size(backbone.blocks)


def _measured(rows: int, out: StepOutput, seconds: float, scored_blocks: float) -> StepReport:
    """What a pass took; the lanes of its first rows are those of answers."""
    executed, answers = out.executed.numpy(), sum(out.lanes.counts[:rows])
    return StepReport(
        rows=answers,
        union=int(out.plan.host.any(0).sum()),
        row_blocks=int(executed[:answers].sum()),
        block_context=int(executed[:answers] @ (out.lanes.slot[:answers] + 1)) if rows else 0,
        prompt_lanes=out.lanes.num - answers,
        prompt_blocks=int(executed[answers:].sum()),
        scored_blocks=scored_blocks,
        seconds=seconds,
    )


def fits_one_pass(executor: Executor | None, starts: Sequence[int], counts: Sequence[int]) -> bool:
    """Whether the fast path takes these new tokens, by sequence, in one pass."""
    if executor is None:
        return False
    numbers = tuple(range(len(counts)))
    return executor.takes(Lanes(numbers, tuple(starts), tuple(counts), torch.device("cpu")))
