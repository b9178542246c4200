"""The model that a recipe trains: base model, fresh adapters, router, prior.

The router is a fresh one, or that of a checkpoint which has nothing else, as `buddy route` fits it:
then it stays as it is, and the adapters grow under its plans.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.backbone.fingerprint import keep_fingerprint
from buddy.backbone.memory import in_format, keep, released_when_run
from buddy.backbone.nf4 import check_nf4
from buddy.checkpoint.adapter import FOLDER, WEIGHTS
from buddy.checkpoint.load import load_parts
from buddy.checkpoint.resolve import ModelName, Resolved, resolve
from buddy.depth.policy import PolicyResources
from buddy.depth.prior import Prior
from buddy.drawn import drawn_by
from buddy.errors import PolicyError, RecipeError
from buddy.hub.loading import stored_dtype
from buddy.hub.mapped_load import MappedWeights
from buddy.model import BuddyForCausalLM
from buddy.policies.learned import LearnedPart
from buddy.policies.measured import read_importance
from buddy.routing.decision import DecisionConfig
from buddy.routing.prior import PriorConfig, normalise_prior
from buddy.routing.router import Router, RouterConfig
from buddy.training.batches import check_context
from buddy.training.router.budgets import budget_range
from buddy.training.router.depths import check_depths, new_scales, start_scales
from buddy.training.router.lora import add_lora, context_layers, start_adapters
from buddy.training.router.recipe import BudgetSettings, Recipe, RouterSettings
from buddy.training.router.teacher import check_teacher

_MAKES_ROUTER: Final = (
    *("planner", "rank", "omega", "prior", "normalisation", "standardise", "spread", "orders"),
)
"""Settings of the router that make a new one."""


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
    _check_untrained(recipe, base)
    if is_fitted(recipe, base):
        _check_fitted(recipe)
    if recipe.model.quant is not None:
        check_nf4(outline.backbone)
    _check_sizes(recipe, outline)
    check_teacher(recipe, outline, base.load_tokenizer)
    _prior(recipe.router, outline)
    if recipe.router.policy != "routed":
        outline.set_policy(recipe.router.policy)


def has_router(base: Resolved) -> bool:
    """Whether a model has a router before training, as `buddy route` fits it."""
    return base.checkpoint is not None and base.checkpoint.manifest.router is not None


def is_fitted(recipe: Recipe, base: Resolved) -> bool:
    """Whether adapters are trained under the plans of a router that the model has already."""
    return recipe.router.policy == "routed" and has_router(base)


def _check_untrained(recipe: Recipe, base: Resolved) -> None:
    """Refuse a checkpoint with more than what chooses blocks: the rest was made for its weights.

    A ledger, which `buddy route` fits too, is no reason to refuse: the result has none.
    """
    if base.checkpoint is None:
        return
    manifest, method = base.checkpoint.manifest, recipe.router.policy.partition(":")[0]
    parts = {
        "adapters": f"{FOLDER}/{WEIGHTS}" in manifest.files,
        "a Budget Predictor": manifest.predictor is not None,
        "the part of another method": manifest.learned is not None
        and manifest.learned.policy != method,
    }
    found = [name for name, is_there in parts.items() if is_there]
    if manifest.base.quant is not None:
        raise RecipeError(
            f"model.name: the weights of {recipe.model.name} are saved in {manifest.base.quant}, "
            "and adapters grow on plain ones: name the model that they were made from"
        )
    if found:
        raise RecipeError(
            f"model.name: {recipe.model.name} is trained already and has {found[0]}: expected a "
            "base model, or a checkpoint of buddy route; name one, or go on with a run by --resume"
        )


def _check_fitted(recipe: Recipe) -> None:
    """Refuse settings of a fresh router, and what would change what a fitted one sees or says."""
    settings, fresh = recipe.router, RouterSettings()
    name = f"{recipe.model.name} has a router, which stays as it was fitted"
    for key in _MAKES_ROUTER:
        if getattr(settings, key) != getattr(fresh, key):
            raise RecipeError(
                f"router.{key} is of a new router, and {name}: leave it out, or name a base model"
            )
    for key, wanted, got in (
        ("optim.router_learning_rate", "0", recipe.optim.router_learning_rate == 0),
        ("lora.keep_context", "true", recipe.lora.keep_context or recipe.lora.rank == 0),
    ):
        if not got:
            raise RecipeError(f"{name}: set {key} to {wanted}")


def build_model(
    recipe: Recipe,
    name: ModelName,
    device: str | torch.device | None = None,
    mapped: MappedWeights | None = None,
) -> BuddyForCausalLM:
    """Load the base model and put on it what is to be trained.

    Args:
        recipe: Of the run.
        name: The base model.
        device: Where it is to lie.
        mapped: Maps the weights of the base, which stay in their files, on the CPU and in the
            number format that they are stored in where that is one: they are to be shared. All else
            is as without.

    Raises:
        ModelError: The base model cannot be loaded.
        BudgetError: The model cannot spend a budget.
        RecipeError: A setting does not fit the model's sizes, or the prior cannot be had.
        PolicyError: The policy cannot serve the model.
    """
    named, dtype = resolve(name), getattr(torch, recipe.model.dtype)
    stored = None if mapped is None else stored_dtype(named.base)
    parts = load_parts(
        named, dtype=stored or dtype, device=device, quant=recipe.model.quant, mapped=mapped
    )
    if mapped is not None:
        keep_fingerprint(parts.hf_model, mapped.release)
    base: BuddyForCausalLM = BuddyForCausalLM.of_parts(parts, named=named)
    budgets = _check_sizes(recipe, base)
    settings, is_routed = recipe.router, recipe.router.policy == "routed"
    with released_when_run(base.backbone.blocks, keep if mapped is None else mapped.release):
        prior = _prior(settings, base)
        order = _order(settings.policy, prior, base)
    router = base.router if is_routed else None
    if is_routed and router is None:
        router = new_router(recipe, base.backbone, prior).to(base.device)
    context = (settings if router is None else router.config).planner.context_layer
    context_only = (
        context_layers(base.model, base.backbone, context) if recipe.lora.keep_context else ()
    )
    blocks = base.backbone.blocks
    with in_format(blocks, dtype) if stored else nullcontext():  # which adapters start in
        adapted: Any = add_lora(base.model, recipe.lora, recipe.optim.seed, context_only)
    scales = new_scales(adapted, recipe.lora, base.num_blocks)
    if recipe.lora.start is not None:
        start_adapters(
            adapted, Path(recipe.lora.start), base.backbone, base.origin.fingerprint, recipe.lora
        )
        start_scales(scales, Path(recipe.lora.start))
    model = BuddyForCausalLM(
        adapted,
        depth_scales=None if scales is None else scales.to(base.device),
        prior=order,
        router=router,
        learned=_part(settings.policy, base),
        policy=settings.policy,
        kv_policy=base.kv_policy,
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
    check_depths(recipe, base.num_blocks)
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
