"""The model that a recipe trains: base model, fresh adapters, fresh router, prior."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from buddy.checkpoint.folder import load
from buddy.depth.policy import PolicyResources
from buddy.errors import PolicyError, RecipeError
from buddy.model import BuddyForCausalLM
from buddy.policies.measured import read_importance
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
            router = Router(config, prior).to(base.device)
    context = settings.planner.context_layer
    kept = context_layers(base.model, base.backbone, context) if recipe.lora.keep_context else ()
    adapted: Any = add_lora(base.model, recipe.lora, recipe.optim.seed, kept)
    if recipe.lora.start is not None:
        start_adapters(adapted, Path(recipe.lora.start), base.backbone, base.source_fingerprint)
    made = BuddyForCausalLM(
        adapted, prior=base.prior if prior is None else prior, router=router, policy=settings.policy
    )
    made.source, made.source_fingerprint = base.source, base.source_fingerprint
    return made.train()


def _prior(setting: str, base: BuddyForCausalLM) -> Tensor | None:
    if setting == "none":
        return None
    if setting != "default":
        return read_prior(Path(setting), base.resources)
    if base.prior is None:
        raise RecipeError(
            'router.prior: this model has no prior of its own: set "none", or measure one with '
            "buddy importance and name its record"
        )
    return base.prior


def read_prior(path: Path, resources: PolicyResources, setting: str = "router.prior") -> Tensor:
    """The normalised prior of the middle blocks, from a record of `buddy importance`.

    Args:
        path: Of the record.
        resources: Of the model that it is to serve.
        setting: That names the record, for messages.

    Raises:
        ResultError: The file cannot be read, or is no record.
        RecipeError: The record is of another model, or of another kind.
    """
    try:
        importance = read_importance(path, resources)
    except PolicyError as error:
        raise RecipeError(f"{setting}: {error}") from error
    return normalise_prior(torch.tensor(importance[1:-1]))
