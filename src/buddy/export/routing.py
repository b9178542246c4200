"""What fixes a plan from a prompt's token ids alone, as plain tensors and JSON.

The first block's values are a function of the token id. So a router that reads them, and a Budget
Predictor beside it, are tables by token id whose rows are pooled over the prompt, and a small head:

    pooled = weighted mean of the rows of `table` [vocab, width]
    scores = up [out, width] @ silu(pooled + last[newest] + bias) + offset    (or pooled + offset)

Another engine needs no weight of the model to know what a request will run.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from buddy.engine.tabulate import first_values
from buddy.errors import PolicyError
from buddy.model import BuddyForCausalLM
from buddy.policies.routed import RoutedPolicy
from buddy.policies.static import StaticPolicy
from buddy.routing.budget_predictor import BudgetPredictor
from buddy.routing.planner import PlannerConfig
from buddy.routing.router import Router

_EXPORTED: Final = "routed, static, static:12,11,20 or static:RECORD.json"


@dataclass(frozen=True, slots=True)
class ExportedRouting:
    """What a manifest says of the routing, and the tensors that go with it.

    Attributes:
        description: Plain JSON: `policy`, `pinned`, `order`, `router`, `predictor`.
        tensors: By name, float32: `prior`, `router.table` and so on.
    """

    description: dict[str, Any]
    tensors: dict[str, Tensor]


def check_exported(model: BuddyForCausalLM) -> None:
    """Refuse a policy whose plan is not known from the token ids before a pass begins.

    Args:
        model: Its weights are not looked at, so an outline will do.

    Raises:
        PolicyError: It is such a policy.
    """
    policy = model.policy
    if isinstance(policy, StaticPolicy):
        return
    if not isinstance(policy, RoutedPolicy):
        raise PolicyError(
            f"policy {policy.name!r} cannot be exported: expected {_EXPORTED}, because a plan is "
            "fixed from a prompt's token ids; name one of these with --policy"
        )
    planner = policy.router.config.planner
    if not _reads_ids_alone(planner):
        raise PolicyError(
            f"the router reads the {planner.context} of block {planner.context_layer}, which "
            "depends on more than token ids, so its plan is not known before a pass: expected one "
            "that reads the value of block 1; export with --policy static"
        )


def export_routing(model: BuddyForCausalLM) -> ExportedRouting:
    """Describe how a model's blocks are chosen.

    Args:
        model: A static policy's prior is measured now, if it is not known.

    Raises:
        PolicyError: `check_exported` refuses its policy.
    """
    check_exported(model)
    policy = model.policy
    description: dict[str, Any] = {"policy": policy.name, "order": None, "router": None}
    tensors: dict[str, Tensor] = {}
    router = model.router if isinstance(policy, RoutedPolicy) else None
    if isinstance(policy, StaticPolicy):
        description["order"] = list(policy.removal_order)
    assert isinstance(policy, StaticPolicy | RoutedPolicy)
    description["pinned"] = sorted(set(policy.pinned))
    prior = model.resources.prior
    if prior is not None and prior.is_known:
        tensors["prior"] = prior.values().float()
    reader = model.router
    predictor = model.predictor if reader and _reads_ids_alone(reader.config.planner) else None
    description["predictor"] = None
    if router is not None or predictor is not None:
        assert reader is not None
        rows = _rows(reader, first_values(model.backbone))
        if router is not None:
            description["router"] = {"decay": router.config.planner.decay}
            tensors |= {f"router.{name}": t for name, t in _router_head(router, rows).items()}
        if predictor is not None:
            description["predictor"] = {
                "decay": reader.config.planner.decay,
                "least_blocks": predictor.lowest,
            }
            head = _predictor_head(predictor, rows)
            tensors |= {f"predictor.{name}": t for name, t in head.items()}
    whole = {name: t.detach().float().contiguous().cpu() for name, t in tensors.items()}
    return ExportedRouting(description, whole)


def _reads_ids_alone(planner: PlannerConfig) -> bool:
    return planner.context == "value" and planner.context_layer == 1


@torch.no_grad()
def _rows(router: Router, values: Float[Tensor, "vocab width"]) -> Float[Tensor, "vocab pooled"]:
    """What the planner pools of each token."""
    if router.config.planner.pool == "scores":
        scored: Tensor = router.decision(values)
        return scored
    return values.float()


@torch.no_grad()
def _router_head(
    router: Router, rows: Float[Tensor, "vocab pooled"]
) -> dict[str, Float[Tensor, "..."]]:
    decision = router.decision
    prior = decision.config.omega * decision.prior
    if router.config.planner.pool == "scores":
        return {"table": rows, "offset": prior}
    return {
        **_first_layer(decision.down.weight, rows),
        "bias": decision.down.bias,
        "up": decision.up.weight,
        "offset": decision.up.bias + prior,
    }


@torch.no_grad()
def _predictor_head(
    predictor: BudgetPredictor, rows: Float[Tensor, "vocab pooled"]
) -> dict[str, Float[Tensor, "..."]]:
    return {
        **_first_layer(predictor.down.weight, rows),
        "bias": predictor.down.bias,
        "up": predictor.up.weight,
        "offset": predictor.up.bias,
    }


def _first_layer(
    weight: Float[Tensor, "rank summary"], rows: Float[Tensor, "vocab pooled"]
) -> dict[str, Float[Tensor, "vocab rank"]]:
    """Pooling commutes with a linear layer; what the newest token adds has a table of its own."""
    width = rows.shape[1]
    tables = {"table": torch.nn.functional.linear(rows, weight[:, :width])}
    if weight.shape[1] > width:
        tables["last"] = torch.nn.functional.linear(rows, weight[:, width:])
    return tables
