"""Session: all that a batch of requests carries from one step to the next."""

from typing import Any

from jaxtyping import Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.depth.plan import DepthPlan
from buddy.depth.policy import RouteState
from buddy.engine.state.cache import BlockKVCache, KVPolicy
from buddy.engine.state.timeline import Timeline


class Session:
    """KV cache, timeline, router state and last plan of a batch.

    It travels as `past_key_values`, and answers to the few names that `generate` calls.

    Args:
        backbone: The model that will run.
        batch: Rows.
        capacity: Slots to allocate at first; buffers grow when they are full.
        kv_policy: What a skipped block leaves in its cache.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, backbone: Backbone, batch: int, capacity: int, kv_policy: KVPolicy) -> None:
        self.timeline = Timeline(batch, capacity, backbone.device)
        self.kv = BlockKVCache(backbone.num_blocks, self.timeline, kv_policy, backbone.project)
        self.route: RouteState | None = None
        self.plan: DepthPlan | None = None
        self.budgets: tuple[int, ...] = ()
        self.steps = 0

    @property
    def state(self) -> tuple[RouteState | None, DepthPlan | None, tuple[int, ...], int]:
        """What routing carries from step to step; set it back to undo a step."""
        return self.route, self.plan, self.budgets, self.steps

    @state.setter
    def state(
        self, state: tuple[RouteState | None, DepthPlan | None, tuple[int, ...], int]
    ) -> None:
        self.route, self.plan, self.budgets, self.steps = state

    def get_seq_length(self, *args: Any) -> int:
        """Slots in use."""
        return self.timeline.length

    def cut(self, length: int) -> None:
        """Forget slots from `length` on; what the policy remembers is the caller's to restore."""
        self.kv.cut(length)
        self.timeline.cut(length)

    def reorder_cache(self, rows: Int[Tensor, " chosen"]) -> None:
        """Keep the rows named, in that order (beam search)."""
        self.kv.select_rows(rows)
        self.timeline.select_rows(rows)
        self.route = None if self.route is None else self.route.select_rows(rows)
        self.plan = None if self.plan is None else self.plan.select_rows(rows)
        self.budgets = tuple(self.budgets[row] for row in rows.tolist())
