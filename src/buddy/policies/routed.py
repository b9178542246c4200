"""Buddy's own policy: the trained router's scores."""

from typing import Any

from torch.nn.functional import pad

from buddy.depth.policy import (
    BlockScores,
    DepthPolicy,
    Observation,
    PolicyResources,
    RowBudgets,
    check_state,
)
from buddy.errors import PolicyError
from buddy.routing.planner import ContextState
from buddy.routing.router import Router
from buddy.routing.token_table import TableState


class RoutedPolicy(DepthPolicy):
    """Scores from the router; the blocks it reads from, and the last one, always run."""

    name = "routed"

    def __init__(self, router: Router) -> None:
        super().__init__(router.config.num_blocks)
        self.router = router
        self.context_layer = router.config.planner.context_layer
        self.pinned = (*range(self.context_layer), self.num_blocks - 1)

    @classmethod
    def from_spec(cls, argument: str, resources: PolicyResources) -> "RoutedPolicy":
        """Make it from `routed`, which takes no argument."""
        if argument:
            raise PolicyError(f"policy routed takes no argument, got {argument!r}")
        if resources.router is None:
            raise PolicyError(
                "this model has no trained router: use --policy static or --policy random, "
                "or load a Buddy checkpoint that has one"
            )
        return cls(resources.router)

    def observe(self, state: Any, seen: Observation) -> ContextState:
        """Add new tokens to the running summary."""
        if isinstance(state, TableState):
            raise PolicyError(
                "this session was begun without gradients, and its router state cannot be carried "
                "into a pass with gradients or with an adapter: begin a new session"
            )
        check_state(state, ContextState, self.name)
        return self.router.observe(state, seen)

    def scores(self, state: ContextState, blocks: RowBudgets) -> BlockScores:
        """The middle blocks' fused scores; pinned blocks need none."""
        return pad(self.router.scores(state), (1, 1))

    def describe(self) -> str:
        """A few words for a summary line."""
        return "trained router"
