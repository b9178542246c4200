"""The trained router, asked before the first block: its token table stands for the cache."""

from typing import Any

from buddy.depth.policy import BlockScores, DepthPolicy, Observation, RowBudgets, check_state
from buddy.policies.routed import RoutedPolicy
from buddy.routing.planner import ContextState
from buddy.routing.token_table import TableState, TokenTable


class TabledPolicy(DepthPolicy):
    """Gives the plans of a `RoutedPolicy` from token ids alone.

    Args:
        routed: The policy that it stands for.
        table: Of that policy's router.
    """

    name = RoutedPolicy.name

    def __init__(self, routed: RoutedPolicy, table: TokenTable) -> None:
        super().__init__(routed.num_blocks)
        self.routed, self.table = routed, table
        self.pinned = routed.pinned

    def observe(self, state: Any, seen: Observation) -> TableState:
        """Add new tokens to the running sum."""
        check_state(state, (ContextState, TableState), self.name)
        return self.table.observe(state, seen.token_ids, seen.router_sees)

    def scores(self, state: TableState, blocks: RowBudgets) -> BlockScores:
        """The middle blocks' fused scores; pinned blocks need none."""
        middle = self.table.scores(state)
        scores = middle.new_zeros(middle.shape[0], self.num_blocks)
        scores[:, 1:-1] = middle
        return scores

    def describe(self) -> str:
        """A few words for a summary line."""
        return self.routed.describe()
