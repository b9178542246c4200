"""Puts a token table in a trained router's place, for as long as no weight changes."""

from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.quantised import QuantisedLinear
from buddy.depth.policy import DepthPolicy, Policy
from buddy.policies.routed import RoutedPolicy
from buddy.policies.tabled import TabledPolicy
from buddy.routing.tensor_version import mark_of
from buddy.routing.token_table import TokenTable, is_tabulable

_AT_ONCE: Final = 2**20
"""Numbers of a residual that are computed at once: more would leave a core's cache."""


class Tabulator:
    """Makes the table when it is first of use, and again when a weight behind it has changed.

    Args:
        backbone: Whose first block the values come from.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._made: tuple[tuple[Any, ...], DepthPolicy] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies begin anew: what first use makes is left out, and made again."""
        return Tabulator, (self._backbone,)

    def __call__(self, policy: Policy) -> Policy:
        """The policy for a pass without gradients: tabled where that gives the same plans."""
        if not isinstance(policy, RoutedPolicy) or torch.is_grad_enabled():
            return policy
        if not is_tabulable(policy.router.config.planner):
            return policy
        projection = self._backbone.value_projection(0)
        if type(projection) not in (nn.Linear, QuantisedLinear):  # an adapter that is not merged
            self._made = None  # merging writes the weights without a trace
            return policy
        router = (*policy.router.parameters(), *policy.router.buffers())
        weights = (*self._backbone.first_values_depend_on(), *router)
        made_of = (policy, *mark_of(weights))
        latest = self._made  # one value: another thread may run under another policy
        if latest is None or latest[0] != made_of:
            table = TokenTable(policy.router, first_values(self._backbone))
            latest = self._made = made_of, TabledPolicy(policy, table)
        return latest[1]


@torch.no_grad()
def first_values(backbone: Backbone) -> Float[Tensor, "vocab width"]:
    """The first block's value of every token id."""
    ids = torch.arange(backbone.embedding.num_embeddings, device=backbone.device)
    parts = torch.split(ids, max(_AT_ONCE // backbone.embedding.embedding_dim, 1))
    with torch.autocast(backbone.device.type, enabled=False):  # it is kept, and serves all passes
        return torch.cat([backbone.values(0, backbone.embed(part[None])[0]) for part in parts])
