"""Shallow passes: rows that decode are fed at few blocks, and what these would say is a draft.

What such a pass leaves in the session is taken back before anything else runs, so rows and their
accounts never see it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

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
from buddy.errors import is_failure
from buddy.generation.depth_drafts import LEAST_CHANCE, num_words
from buddy.generation.next_token import best_and_chances

if TYPE_CHECKING:
    from buddy.serving.rows.row import Row

_LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class ShallowDraft:
    """A row's draft on its way."""

    row: "Row"
    blocks: int
    """Blocks of the passes that make it."""
    room: int
    """Tokens that it may still get."""
    chance: float
    """That its next token is right, by how often earlier drafts of this text were."""
    tokens: list[int] = field(default_factory=list)
    sure: float = 1.0
    """Product of the probabilities of its tokens, as the passes that drafted them saw these."""

    def add(self, token: int, sure: float) -> None:
        """Go on by a token; one that no draft may hold ends it."""
        assert self.row.drafter is not None
        if token in self.row.drafter.never:
            self.room = 0
            return
        self.tokens.append(token)
        self.sure *= sure
        self.room = self.room - 1 if self.sure >= LEAST_CHANCE else 0


class ShallowPasses:
    """Runs them on the session of the rows.

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
        batch_route: BatchRoute,
    ) -> None:
        self._backbone, self._policy, self._session = backbone, policy, session
        self._executor, self._batch_route = executor, batch_route
        self._num_logits = num_words(executor, backbone.vocab)
        self.seconds, self.blocks = 0.0, 0
        """What they took since somebody last set these to 0, and the blocks that ran."""

    def lengthen(
        self,
        drafts: Sequence[ShallowDraft],
        choose: Callable[[Sequence[ShallowDraft]], Sequence[ShallowDraft]],
        measured: Callable[[Sequence[ShallowDraft], float], None],
    ) -> None:
        """Let drafts go on, a token of each in a pass, while any is chosen.

        A pass that fails ends all of them: the rows are then told by the pass that feeds them.

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
        except BaseException as error:
            if not is_failure(error):
                raise
            _LOG.warning("a pass that drafts by few blocks has failed: %s", error)
        finally:
            if self._session.state is not before:
                self._session.rewind(before)

    def _pass(self, drafts: Sequence[ShallowDraft]) -> None:
        rows = [draft.row for draft in drafts]
        sequence_ids = [row.sequence for row in rows if row.sequence is not None]
        tokens = [(draft.tokens or [draft.row.last])[-1] for draft in drafts]
        states = zip(self._session.find(sequence_ids), drafts, strict=True)
        step = Step(
            sequence_ids=sequence_ids,
            feed=Feed(
                token_ids=on_device(np.array(tokens, np.int64), self._backbone.device),
                counts=(1,) * len(rows),
            ),
            sequences=[
                replace(state, source=ConstantBudget(draft.blocks)) for state, draft in states
            ],
            batch_route=self._batch_route,
            routed_alone=[
                row.sequence for row in rows if row.is_seeded and row.sequence is not None
            ],
            num_logits=self._num_logits,
        )
        out = run_step(self._backbone, self._policy, self._session, step, executor=self._executor)
        self.blocks += int(out.executed.sum())
        logits = logits_of(self._backbone, out, self._executor, num_logits=self._num_logits)
        best, chances = best_and_chances(logits.float())
        for draft, token, sure in zip(drafts, best.tolist(), chances, strict=True):
            draft.add(token, sure)
