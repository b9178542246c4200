"""Tokenwise steering: each new token of a pass is planned as decode steps of one would plan it.

So a pass over drafted tokens runs for each of them what plain decoding runs: the budget that the
source names then, and the plan of the scores as they are then. What is accepted is kept with what
the sequence carried at that token, and the rest is as if it had not been fed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from buddy.depth.plan import DepthPlan
from buddy.depth.policy import DepthPolicy, Observation, Policy
from buddy.engine.executors.protocol import Run
from buddy.engine.feed import Feed
from buddy.engine.state.lanes import Lanes
from buddy.engine.state.sequence import SequenceState
from buddy.engine.state.session import Session
from buddy.engine.steer import BatchRoute, BudgetedSteering, Steering
from buddy.engine.step import ask_budgets, ask_notes
from buddy.errors import PolicyError


def why_no_drafts(policy: Policy) -> str | None:
    """Why a policy cannot plan drafted tokens, and what to do; None = it can."""
    if isinstance(policy, DepthPolicy):
        return None
    return (
        f"policy {policy.name!r} decides while blocks run, and drafted tokens are planned before "
        "they do: leave drafts out, or use a policy that scores blocks"
    )


class TokenwiseSteering(Steering):
    """Plans the new tokens of answers one after another.

    The first new tokens of all sequences are planned as one decode step, then the second ones of
    those that have a second, and so on.

    Args:
        policy: Scores the blocks.
        sequences: Of the pass, in the order of its lanes; each has had its prompt.
        batch_route: Whose scores rank the blocks.
        routed_alone: Places of sequences that are routed independently, whatever `batch_route`
            says.

    Raises:
        PolicyError: The policy decides while blocks run, so that no token can be planned beside
            those before it.
    """

    def __init__(
        self,
        policy: Policy,
        sequences: Sequence[SequenceState],
        batch_route: BatchRoute = "independent",
        routed_alone: Collection[int] = (),
    ) -> None:
        if not isinstance(policy, DepthPolicy):
            raise PolicyError(why_no_drafts(policy))
        self._policy = policy
        self._batch_route, self._routed_alone = batch_route, routed_alone
        self._after = [[sequence] for sequence in sequences]

    def segments(self, num_blocks: int) -> Sequence[range]:
        """Up to the context layer, and the rest."""
        return range(self._policy.context_layer), range(self._policy.context_layer, num_blocks)

    def plan(self, blocks: range, run: Run) -> DepthPlan | None:
        """The plan of each token by the scores after it."""
        if blocks.start < self._policy.context_layer:
            return None
        lanes, seen = run.lanes, run.observe(self._policy.context_layer)
        host = np.empty((lanes.num, blocks.stop), np.bool_)
        for number in range(max(lanes.counts)):
            places = [place for place, count in enumerate(lanes.counts) if count > number]
            host[lanes.first[places] + number] = self._choose(lanes, seen, places, number).host
        self.routes = [route for *_, last in self._after if (route := last.route) is not None]
        return DepthPlan.of_lanes(host, lanes.device)

    def _choose(self, lanes: Lanes, seen: Observation, places: list[int], number: int) -> DepthPlan:
        """The plan of a decode step that feeds one token of each of these sequences."""
        sequences = [self._after[place][-1] for place in places]
        token_ids = seen.token_ids[places, number]
        feed = Feed(token_ids=token_ids, counts=(1,) * len(places), prompts=(False,) * len(places))
        budgets = ask_budgets(sequences, feed, self._policy.num_blocks)
        for budget in budgets:
            self._policy.check_spendable(budget)
        alone = [at for at, place in enumerate(places) if place in self._routed_alone]
        inner = BudgetedSteering(
            self._policy, sequences, budgets, self._batch_route, alone, sees_all=True
        )
        step = Lanes(
            tuple(lanes.rows[place] for place in places),
            tuple(lanes.starts[place] + number for place in places),
            feed.counts,
            lanes.device,
        )
        plan = inner.choose(step, _nth(seen, places, number))
        notes = ask_notes(sequences, feed, self._policy.num_blocks)
        for at, (place, before) in enumerate(zip(places, sequences, strict=True)):
            after = replace(
                before,
                length=before.length + 1,
                steps=before.steps + 1,
                executed=before.executed + int(plan.host[at].sum()),
                note=notes[at],
                route=inner.routes[at],
                block_mask=plan.host[at],
                blocks=budgets[at][0],
            )
            self._after[place].append(after)
        return plan

    def after(self, place: int, tokens: int) -> SequenceState:
        """What a sequence carries on from its first new tokens.

        Args:
            place: Of the sequence in the pass.
            tokens: How many of its new tokens are kept; 0 = it is as it was.
        """
        return self._after[place][tokens]


def _nth(seen: Observation, places: list[int], number: int) -> Observation:
    """One new token of each of these sequences."""
    parts = (seen.token_ids, seen.router_sees, seen.keys, seen.values)
    chosen = (None if part is None else part[places, number, None] for part in parts)
    return Observation(*chosen)  # type: ignore[arg-type]  # the first two are never None


def keep_tokens(
    session: Session, kept: Mapping[int, SequenceState], columns: int | None = None
) -> None:
    """Take back what a pass committed beyond the tokens that are kept.

    Args:
        session: Which the pass was of.
        kept: By id, what each sequence of the pass carries on; one that has left is passed over.
        columns: Of a padded batch, in all; None = as they are.
    """
    state = session.state
    here = {at: kept.get(at, sequence) for at, sequence in state.sequences.items()}
    session.rewind(
        replace(state, sequences=here, columns=state.columns if columns is None else columns)
    )
