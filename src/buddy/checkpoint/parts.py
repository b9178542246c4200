"""What a model is put together from: a checkpoint is written from it, and loads to it."""

from dataclasses import dataclass
from typing import Any, Final, TypedDict

from jaxtyping import Float
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.depth_scales import DepthScales
from buddy.backbone.nf4 import FrozenFormat
from buddy.backbone.quantised import Quantisation
from buddy.checkpoint.card import Card
from buddy.depth.prior import Prior
from buddy.engine.state.cache import DEFAULT_KV_POLICY, KVPolicy
from buddy.policies.learned import LearnedPart
from buddy.routing.budget_predictor import BudgetPredictor
from buddy.routing.ledger import Ledger
from buddy.routing.router import Router

ROUTING_FILE: Final = "routing.safetensors"
MODULES: Final = ("router", "predictor", "ledger", "learned", "depth_scales")
"""Parts of routing that have weights."""


class RoutingParts(TypedDict, total=False):
    """What is known or learned of a model's blocks, beside its weights."""

    prior: Float[Tensor, " middle"] | Prior | None
    """Normalised importance of the middle blocks, [blocks - 2], or a `Prior`, which may measure it
    when a budget below full depth first needs it."""
    router: Router | None
    """A trained router."""
    predictor: BudgetPredictor | None
    """A trained Budget Predictor for that router; budget "auto" needs one."""
    ledger: Ledger | None
    """What depth is worth to each token; a budget such as "mean:0.7" needs one."""
    learned: LearnedPart | None
    """The trained part of another method."""
    depth_scales: DepthScales | None
    """Those of adapters that know how many blocks a token runs."""


def check_names(routing: RoutingParts) -> None:
    """Refuse a keyword that names no part; Python asks this of keywords that a function lists.

    Raises:
        TypeError: There is one.
    """
    unknown = sorted(routing.keys() - RoutingParts.__annotations__.keys())
    if unknown:
        known = ", ".join(RoutingParts.__annotations__)
        raise TypeError(f"a model has no part {unknown[0]!r}: expected {known}")


def trained_modules(routing: RoutingParts) -> dict[str, nn.Module]:
    """The parts that have weights, as many of them as a model has, by name."""
    parts: dict[str, Any] = {name: routing.get(name) for name in MODULES}
    return {name: module for name, module in parts.items() if module is not None}


def describe_module(module: nn.Module) -> dict[str, Any]:
    """What gives a part of routing its shapes, as plain JSON."""
    described: Any = module if isinstance(module, LearnedPart) else module.config
    settings: dict[str, Any] = described.to_json()
    return settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a model's weights come from, and what was done to them since."""

    source: str | None = None
    """Where the base model can be loaded from again; None where it cannot."""
    fingerprint: str | None = None
    """Fingerprint of the base model as it was loaded from there."""
    merged_adapter: str | None = None
    """Fingerprint of the adapter that was folded into the weights; None where none was."""
    quant: Quantisation | FrozenFormat | None = None
    """How the weights were quantised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParts:
    """A model in parts."""

    hf_model: Any
    """A Hugging Face causal LM, bare or wrapped by PEFT."""
    backbone: Backbone
    """Its blocks, and what is around them."""
    routing: RoutingParts
    policy: str | None = None
    """Text that `set_policy` takes. None for the default of a loaded model, or where the policy of
    a model to be saved is an object without a name."""
    kv_policy: KVPolicy = DEFAULT_KV_POLICY
    origin: Origin = Origin()
    card: Card | None = None


def base_of_adapted(model: nn.Module) -> nn.Module:
    """The causal LM inside of a PEFT model, whose linear layers PEFT has changed in place."""
    base: nn.Module = getattr(model, "get_base_model", lambda: model)()
    return base
