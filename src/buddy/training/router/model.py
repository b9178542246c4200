"""The model that a recipe trains: base model, fresh adapters, fresh router, prior."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.backbone.nf4 import check_nf4
from buddy.checkpoint.resolve import ModelName, Resolved
from buddy.depth.policy import PolicyResources
from buddy.depth.prior import Prior
from buddy.drawn import drawn_by
from buddy.errors import PolicyError, RecipeError
from buddy.model import BuddyForCausalLM
from buddy.policies.learned import LearnedPart
from buddy.policies.measured import read_importance
from buddy.routing.decision import DecisionConfig
from buddy.routing.prior import PriorConfig, normalise_prior
from buddy.routing.router import Router, RouterConfig
from buddy.training.batches import check_context
from buddy.training.router.budgets import budget_range
from buddy.training.router.lora import add_lora, context_layers, start_adapters
from buddy.training.router.recipe import BudgetSettings, Recipe, RouterSettings
from buddy.training.router.teacher import check_teacher


def check_recipe(recipe: Recipe, base: Resolved) -> None:
    """Refuse what shows to be wrong before weights are fetched.

    Args:
        recipe: Of the run.
        base: The model that it names.

    Raises:
        BuddyError: A budget, a policy, a prior, a teacher or a size that does not fit, or a 4-bit
            base that cannot be had.
    """
    outline = BuddyForCausalLM.outline(base)
    if recipe.model.quant is not None:
        check_nf4(outline.backbone)
    _check_sizes(recipe, outline)
    check_teacher(recipe, outline, base.load_tokenizer)
    _prior(recipe.router, outline)
    if recipe.router.policy != "routed":
        outline.set_policy(recipe.router.policy)


def build_model(
    recipe: Recipe, name: ModelName, device: str | torch.device | None = None
) -> BuddyForCausalLM:
    """Load the base model and put on it what is to be trained.

    Args:
        recipe: Of the run.
        name: The base model.
        device: Where it is to lie.

    Raises:
        ModelError: The base model cannot be loaded.
        BudgetError: The model cannot spend a budget.
        RecipeError: A setting does not fit the model's sizes, or the prior cannot be had.
        PolicyError: The policy cannot serve the model.
    """
    base = BuddyForCausalLM.from_pretrained(
        name, dtype=getattr(torch, recipe.model.dtype), device=device, quant=recipe.model.quant
    )
    if base.router is not None or hasattr(base.model, "peft_config"):
        raise RecipeError(
            f"model.name: {recipe.model.name} is trained already: name the base model, or go on "
            "with a run by --resume"
        )
    budgets = _check_sizes(recipe, base)
    settings = recipe.router
    prior = _prior(settings, base)
    order = _order(settings.policy, prior, base)
    router = None
    if settings.policy == "routed":
        router = new_router(recipe, base.backbone, prior).to(base.device)
    context = settings.planner.context_layer
    context_only = (
        context_layers(base.model, base.backbone, context) if recipe.lora.keep_context else ()
    )
    adapted: Any = add_lora(base.model, recipe.lora, recipe.optim.seed, context_only)
    if recipe.lora.start is not None:
        start_adapters(
            adapted, Path(recipe.lora.start), base.backbone, base.origin.fingerprint, recipe.lora
        )
    model = BuddyForCausalLM(
        adapted,
        prior=order,
        router=router,
        learned=_part(settings.policy, base),
        policy=settings.policy,
        origin=base.origin,
    )
    model.scoring_policy.check_spendable(budgets)
    return model.train()


def _part(policy: str, base: BuddyForCausalLM) -> LearnedPart | None:
    """The trained part that the policy chooses by, as it was fitted before tuning."""
    part = base.learned
    return part if part is not None and policy.partition(":")[0] == part.policy else None


def new_router(recipe: Recipe, backbone: Backbone, prior: Prior | None) -> Router:
    """A router as a recipe says, for a model, before its first step."""
    settings = recipe.router
    config = RouterConfig(
        num_blocks=backbone.num_blocks,
        token_width=backbone.kv_width,
        planner=settings.planner,
        decision=DecisionConfig(rank=settings.rank, omega=settings.omega),
    )
    with drawn_by(recipe.optim.seed):
        return Router(config, None if prior is None else prior.values())


def _check_sizes(recipe: Recipe, base: BuddyForCausalLM) -> set[int]:
    """Refuse what does not fit the model, before adapters are made and rows are read.

    Returns:
        The budgets of steps and evaluations, in blocks.
    """
    hidden_size = base.config.hidden_size
    if recipe.lora.rank > hidden_size:
        raise RecipeError(
            f"lora.rank must be at most {hidden_size:,}, the model's hidden size, got "
            f"{recipe.lora.rank:,}"
        )
    check_context(recipe.data.max_tokens, base)
    for order in recipe.router.orders:
        read_prior(Path(order.record), base.resources, "router.orders")
    evaluated = BudgetSettings(choices=recipe.log.evaluate_budgets)
    return {
        *budget_range(recipe.budget, base.num_blocks),
        *budget_range(evaluated, base.num_blocks),
    }


def _prior(settings: RouterSettings, base: BuddyForCausalLM) -> Prior | None:
    """What the router starts from."""
    if settings.prior == "none":
        return None
    if settings.prior == "default":
        return base.resources.prior
    path = Path(settings.prior)
    values = read_prior(path, base.resources, normalisation=settings.normalisation)
    return Prior(values, f"prior of {path.name}")


def _order(policy: str, prior: Prior | None, base: BuddyForCausalLM) -> Prior | None:
    """What the policy static goes by: measured before an adapter is on the model, or not at all."""
    order = prior or base.resources.prior
    if order is not None and (policy == "static" or prior is not None):
        order.values()
    return order if order is not None and order.is_known else None


def read_prior(
    path: Path,
    resources: PolicyResources,
    setting: str = "router.prior",
    *,
    normalisation: PriorConfig | None = None,
) -> Tensor:
    """The normalised prior of the middle blocks, from a record of `buddy importance`.

    Args:
        path: Of the record.
        resources: Of the model that it is to serve.
        setting: That names the record, for messages.
        normalisation: How the importance becomes the prior; by ranks if not given.

    Raises:
        ResultError: The file cannot be read, or is no record.
        RecipeError: The record is of another model, or of another kind.
    """
    try:
        importance = read_importance(path, resources)
    except PolicyError as error:
        raise RecipeError(f"{setting}: {error}") from error
    return normalise_prior(torch.tensor(importance[1:-1]), normalisation)
