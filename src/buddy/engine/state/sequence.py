"""What one sequence carries from step to step; never changed, always replaced."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from buddy.budget.source import BudgetSource
from buddy.depth.policy import RouteState, join_states

Reroute = Literal["step", "prefill"] | int
"""New plan at every decode step, never after prefill (the paper's *Reuse*), or every n steps."""


@dataclass(frozen=True, slots=True)
class RouteRow:
    """A sequence's row of a route state that several sequences share."""

    state: RouteState
    row: int
    rows: int
    """Rows of the state, all together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceState:
    """What one sequence carries from step to step."""

    row: int
    """Its row of the cache."""
    source: BudgetSource
    """Says how many blocks its tokens may run."""
    reroute: Reroute = "step"
    """When its blocks are chosen again."""
    length: int = 0
    """Tokens that were fed."""
    steps: int = 0
    """Steps that it took part in."""
    executed: int = 0
    """Blocks that its tokens ran, all together."""
    note: Any = None
    """What its source has noted of them."""
    prompt_length: int = 0
    """Tokens of its prompt that were fed."""
    prompt_executed: int = 0
    """Blocks that these ran, all together."""
    route: RouteRow | None = None
    """What the policy remembers of it."""
    block_mask: NDArray[np.bool_] | None = None
    """[blocks], the plan of its last token."""
    blocks: int = 0
    """The budget of that token."""


def gather_routes(routes: Sequence[RouteRow]) -> RouteState:
    """The route state of these sequences, side by side; as it is, where they shared a state."""
    first_state = routes[0].state
    if routes[0].rows == len(routes) and all(
        route.state is first_state and route.row == at for at, route in enumerate(routes)
    ):
        return first_state
    states: dict[int, RouteState] = {}
    rows: dict[int, list[int]] = {}
    for route in routes:
        states.setdefault(id(route.state), route.state)
        rows.setdefault(id(route.state), []).append(route.row)
    order = [(id(route.state), route.row) for route in routes]
    if len(states) == 1:
        return first_state.select_rows(torch.tensor(rows[id(first_state)]))
    parts = [state.select_rows(torch.tensor(rows[key])) for key, state in states.items()]
    place = {
        (key, row): at
        for at, (key, row) in enumerate((key, row) for key in states for row in rows[key])
    }
    return join_states(parts).select_rows(
        torch.tensor([place[key_and_row] for key_and_row in order])
    )
