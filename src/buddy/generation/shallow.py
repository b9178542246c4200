"""Shallow passes: rows that decode are fed at few blocks, and what these would say is a draft.

What such a pass leaves in the session is taken back before anything else runs, so rows and their
accounts never see it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from buddy.backbone.backbone import Backbone
from buddy.budget.source import ConstantBudget
from buddy.depth.plan import on_device
from buddy.depth.policy import Policy
from buddy.engine.executors.protocol import Executor
from buddy.engine.feed import Feed
from buddy.engine.run import run_step
from buddy.engine.state.session import Session
from buddy.engine.steer import BatchRoute
from buddy.engine.step import Step, logits_of
from buddy.generation import depth_drafts
from buddy.generation.next_token import best_and_chances
from buddy.generation.text_drafter import TextDrafter


@dataclass(slots=True, eq=False)
class DraftedRow:
    """A row that is drafted for in a pass that feeds its last token."""

    sequence: int
    """Its id in the session."""
    last: int
    """That token."""
    room: int
    """Tokens that may be drafted: the pass that verifies them makes one itself."""
    drafter: TextDrafter
    """What its text is drafted from."""
    blocks: int | None
    """Blocks of the passes that draft for it; None = none do."""
    is_seeded: bool = False
    """Whether its text may depend on it alone, whoever is beside it."""


@dataclass(slots=True, eq=False)
class ShallowDraft:
    """A row's draft on its way."""

    row: DraftedRow
    blocks: int
    """Blocks of the passes that make it."""
    room: int
    """Tokens that it may still get."""
    tokens: list[int]
    """What it has."""
    sure: float = 1.0
    """Product of the probabilities of its tokens, as the passes that drafted them saw these."""

    @property
    def chance(self) -> float:
        """The chance that its next token is right, and all before it."""
        return self.sure * self.row.drafter.chance

    def add(self, token: int, sure: float) -> None:
        """Go on by a token; one that no draft may hold ends it."""
        if token in self.row.drafter.never:
            self.room = 0
            return
        self.tokens.append(token)
        self.sure *= sure
        self.room = self.room - 1 if self.sure >= depth_drafts.LEAST_CHANCE else 0


class ShallowPasses:
    """Runs them on a session.

    Args:
        backbone: Runs the blocks.
        policy: Chooses them.
        session: Has the sequences of the rows.
        executor: Runs the passes that it takes; None = the general path does.
        batch_route: Whose scores rank the blocks of a pass.
    """

    def __init__(
        self,
        backbone: Backbone,
        policy: Policy,
        session: Session,
        executor: Executor | None,
        batch_route: BatchRoute = "independent",
    ) -> None:
        self._backbone, self._policy, self._session = backbone, policy, session
        self._executor, self._batch_route = executor, batch_route
        self._num_logits = depth_drafts.num_words(executor, backbone.vocab)
        self.seconds, self.blocks = 0.0, 0
        """What they took since somebody last set these to 0, and the blocks that ran."""

    def lengthen(
        self,
        drafts: Sequence[ShallowDraft],
        choose: Callable[[Sequence[ShallowDraft]], Sequence[ShallowDraft]],
        measured: Callable[[Sequence[ShallowDraft], float], None],
    ) -> None:
        """Let drafts go on, a token of each in a pass, while any is chosen.

        Args:
            drafts: Of rows that have had their prompts.
            choose: Says of those that have room which take part in one more pass.
            measured: Told of each pass, and the seconds that it took.
        """
        before = self._session.state
        try:
            while drafts := choose([draft for draft in drafts if draft.room > 0]):
                started_s = time.perf_counter()
                self._pass(drafts)
                seconds = time.perf_counter() - started_s
                self.seconds += seconds
                measured(drafts, seconds)
        finally:
            if self._session.state is not before:
                self._session.rewind(before)

    def _pass(self, drafts: Sequence[ShallowDraft]) -> None:
        sequence_ids = [draft.row.sequence for draft in drafts]
        tokens = [(draft.tokens or [draft.row.last])[-1] for draft in drafts]
        states = zip(self._session.find(sequence_ids), drafts, strict=True)
        step = Step(
            sequence_ids=sequence_ids,
            feed=Feed(
                token_ids=on_device(np.array(tokens, np.int64), self._backbone.device),
                counts=(1,) * len(drafts),
            ),
            sequences=[
                replace(state, source=ConstantBudget(draft.blocks)) for state, draft in states
            ],
            batch_route=self._batch_route,
            routed_alone=[draft.row.sequence for draft in drafts if draft.row.is_seeded],
            num_logits=self._num_logits,
        )
        out = run_step(self._backbone, self._policy, self._session, step, executor=self._executor)
        self.blocks += int(out.executed.sum())
        logits = logits_of(self._backbone, out, self._executor, num_logits=self._num_logits)
        best, chances = best_and_chances(logits.float())
        for draft, token, sure in zip(drafts, best.tolist(), chances, strict=True):
            draft.add(token, sure)
