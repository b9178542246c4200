"""What must hold before a routing run begins."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from buddy.budget.blocks import least_blocks
from buddy.checkpoint.parts import trained_modules
from buddy.checkpoint.quick_prior import QuickPrior
from buddy.checkpoint.resolve import ModelName, Resolved, resolve
from buddy.depth.prior import OnProgress, Prior
from buddy.errors import RecipeError, TrainingError
from buddy.model import BuddyForCausalLM
from buddy.policies.static import StaticPolicy
from buddy.records import read_record
from buddy.training.route.recipe import RouteRecipe, SearchSettings
from buddy.training.state import RECORD, STATE

KIND: Final = "training-route"
"""What the record of a run is called."""


@dataclass(frozen=True, slots=True)
class Described:
    """A model before its weights are fetched.

    Attributes:
        resolved: What its name stands for.
        outline: Its blocks and its context; runs nothing.
        tokenizer: Its own.
    """

    resolved: Resolved
    outline: BuddyForCausalLM
    tokenizer: Any

    @classmethod
    def of(cls, name: ModelName) -> "Described":
        """Look up a model by name.

        Raises:
            BuddyError: It cannot be found or understood.
        """
        resolved = resolve(name)
        outline = BuddyForCausalLM.outline(resolved, policy="full")
        return cls(resolved, outline, resolved.load_tokenizer())


def check_out(out: Path, recipe: RouteRecipe) -> list[str]:
    """Refuse the folder of another kind of run, whose checkpoint and record would be replaced.

    Returns:
        Notes: that a finished run of other settings will be.
    """
    path = out / RECORD
    record = read_record(path) if path.exists() else None
    if (record is not None and record["kind"] != KIND) or (out / STATE).exists():
        raise TrainingError(f"{out} holds another kind of run: name another --out")
    if record is None:
        return []
    asked = json.loads(json.dumps(asdict(recipe)))
    other = [name for name, value in asked.items() if record["config"].get(name) != value]
    return [
        f"the finished run in {out} had another {name}: this one replaces it when it ends"
        for name in other
    ]


def check_untrained(recipe: RouteRecipe, outline: BuddyForCausalLM) -> None:
    """Refuse a model whose own parts of routing would be lost."""
    trained = list(trained_modules(outline.routing))
    if trained:
        raise RecipeError(
            f"model.name: {recipe.model.name} has a trained {trained[0]} already, which a new "
            "router would replace: name its base model"
        )


def depths_in_blocks(settings: SearchSettings, num_blocks: int) -> tuple[int, ...]:
    """The depths in blocks, deepest first; by default those that the model can run."""
    least = least_blocks(num_blocks)
    if num_blocks <= least:
        raise RecipeError(
            f"model.name: of a model of {num_blocks} blocks none can be left out: expected "
            f"{least + 1} or more"
        )
    depths = [round(share * num_blocks) for share in settings.depths]
    if settings.depths == SearchSettings().depths:
        depths = [min(max(blocks, least), num_blocks - 1) for blocks in depths]
    if not all(least <= blocks < num_blocks for blocks in depths):
        raise RecipeError(
            f"search.depths: of {num_blocks} blocks they are {depths}, expected {least} to "
            f"{num_blocks - 1}"
        )
    return tuple(dict.fromkeys(depths))


def prior_order(model: BuddyForCausalLM, on_progress: OnProgress) -> tuple[int, ...]:
    """The removal order that the model has without a router.

    Args:
        model: That is routed.
        on_progress: Told how far the order is, where it is measured now.
    """
    prior = model.resources.prior
    if prior is None:
        raise RecipeError("model.name: this model has no prior: name a base model")
    if isinstance(prior, QuickPrior):  # what it advises is what is being done
        values = prior.values(on_progress, advises=False)
    else:
        values = prior.values(on_progress)
    return StaticPolicy(Prior(values), model.num_blocks).removal_order
