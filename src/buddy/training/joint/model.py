"""The model that a recipe trains: base model, fresh adapters, fresh router, prior."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from buddy.checkpoint.folder import load
from buddy.depth.prior import Prior
from buddy.errors import RecipeError
from buddy.model import BuddyForCausalLM
from buddy.records import read_record
from buddy.routing.decision import DecisionConfig
from buddy.routing.prior import normalise_prior
from buddy.routing.router import Router, RouterConfig
from buddy.training.joint.lora import add_lora, context_layers, start_adapters
from buddy.training.joint.recipe import Recipe


def build_model(recipe: Recipe, device: str | torch.device | None = None) -> BuddyForCausalLM:
    """Load the base model and put on it what is to be trained.

    Raises:
        ModelError: The base model cannot be loaded.
        RecipeError: The prior cannot be had, or does not fit.
        PolicyError: The policy cannot serve the model.
    """
    base = load(recipe.model.name, dtype=getattr(torch, recipe.model.dtype), device=device)
    if base.router is not None or hasattr(base.model, "peft_config"):
        raise RecipeError(
            f"model.name: {recipe.model.name} is trained already: name the base model, or go on "
            "with a run by --resume"
        )
    settings = recipe.router
    prior = _prior(settings.prior, base)
    order = _order(settings.policy, prior, base)
    router = None
    if settings.policy == "routed":
        config = RouterConfig(
            num_blocks=base.num_blocks,
            token_width=base.backbone.kv_width,
            planner=settings.planner,
            decision=DecisionConfig(rank=settings.rank, omega=settings.omega),
        )
        with torch.random.fork_rng():
            torch.manual_seed(recipe.optim.seed)
            router = Router(config, None if prior is None else prior.values()).to(base.device)
    context = settings.planner.context_layer
    kept = context_layers(base.model, base.backbone, context) if recipe.lora.keep_context else ()
    adapted: Any = add_lora(base.model, recipe.lora, recipe.optim.seed, kept)
    if recipe.lora.start is not None:
        start_adapters(adapted, Path(recipe.lora.start), base.backbone, base.source_fingerprint)
    made = BuddyForCausalLM(adapted, prior=order, router=router, policy=settings.policy)
    made.source, made.source_fingerprint = base.source, base.source_fingerprint
    return made.train()


def _prior(setting: str, base: BuddyForCausalLM) -> Prior | None:
    """What the router starts from."""
    if setting == "none":
        return None
    if setting == "default":
        return base.resources.prior
    path = Path(setting)
    return Prior(read_prior(path, base.num_blocks), f"prior of {path.name}")


def _order(policy: str, prior: Prior | None, base: BuddyForCausalLM) -> Prior | None:
    """What the policy static goes by: measured before an adapter is on the model, or not at all."""
    order = prior or base.resources.prior
    if order is not None and (policy == "static" or prior is not None):
        order.values()
    return order if order is not None and order.is_known else None


def read_prior(path: Path, num_blocks: int) -> Tensor:
    """The normalised prior of the middle blocks, from a record of `buddy importance`.

    A search (SLEB) measures no importance: the places in its removal order take its stead.

    Raises:
        RecipeError: The record is of another model, or of another kind.
    """
    results = read_record(path)["results"]
    importance = results.get("importance")
    if importance is None and "removal_order" in results:
        importance = [float(num_blocks)] * num_blocks
        for place, block in enumerate(results["removal_order"]):
            importance[block] = float(place)
    if not isinstance(importance, list) or len(importance) != num_blocks:
        raise RecipeError(
            f"router.prior: {path} has no importance of {num_blocks} blocks: expected a record of "
            "buddy importance for this model"
        )
    return normalise_prior(torch.tensor(importance[1:-1]))
