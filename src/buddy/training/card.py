"""Drafts the model card of a trained checkpoint: what only its maker knows is left to be stated."""

from collections.abc import Sequence
from typing import Any, Final

from buddy.checkpoint.card import Card
from buddy.data.examples import Source
from buddy.routing.measured_constant import MeasuredConstant
from buddy.training.predictor.recipe import BudgetRecipe
from buddy.training.router.evaluate import Evaluation
from buddy.training.router.recipe import Recipe

TO_STATE: Final = """\
## To be stated by who publishes it

Licence (those of the base model, the data and a teacher bind it), intended use, and limits. Name
the records that these statements rest on.
"""


def stage_1_card(recipe: Recipe, examples: int, evaluations: Sequence[Evaluation]) -> Card:
    """The card of adapters and router.

    Args:
        recipe: That they were trained by.
        examples: Training examples that the data gave.
        evaluations: At the end of the run.
    """
    optim, router = recipe.optim, recipe.router
    steps = optim.steps or round(optim.epochs * examples / optim.batch_size)
    chosen = "a trained router" if router.policy == "routed" else f"the policy `{router.policy}`"
    adapters = f"LoRA of rank {recipe.lora.rank}" if recipe.lora.rank else "no adapters"
    by = f", taught by `{recipe.teacher.name}`" if recipe.teacher.name else ""
    text = f"""\
# A Buddy checkpoint

Buddy runs exactly as many Transformer blocks of this model as a budget allows. Blocks are chosen
by {chosen}.

## Training

{adapters} on `{recipe.model.name}`{by}, {steps:,} steps of {optim.batch_size} examples at a peak
learning rate of {optim.learning_rate:g}. `record.json` beside this folder has every setting.

{list_sources(recipe.data.train)}
"""
    if evaluations:
        rows = "\n".join(
            f"| {each.blocks} | {each.cross_entropy:.3f} | {each.distinct_plans} |"
            for each in evaluations
        )
        text += f"""
## Evaluation

Held-out rows of the recipe, nats a token:

| executed blocks | cross-entropy | distinct plans |
|---:|---:|---:|
{rows}
"""
    return Card(text=f"{text}\n{TO_STATE}", facts=base_facts(recipe.model.name))


def with_stage_2(
    card: Card | None, recipe: BudgetRecipe, constant: MeasuredConstant | None
) -> Card:
    """A card with what the Budget Predictor was trained by, and what it is worth."""
    before = card or Card(text="# A Buddy checkpoint\n", facts={"library_name": "buddy-llm"})
    text = f"""\
{before.text.rstrip()}

## Budget Predictor

Trained for {recipe.optim.steps:,} steps on the budgets of prompts from:

{list_sources(recipe.data.train)}
"""
    if constant is not None:
        text += f"\nMean reward on held-out prompts: {constant.describe()}.\n"
    return Card(text=text, facts=before.facts)


def routed_card(
    name: str, sources: Sequence[Source], groups: Sequence[str], *, has_ledger: bool
) -> Card:
    """The card of a router for frozen weights.

    Args:
        name: The model, as the recipe names it.
        sources: Of the rows.
        groups: Of prompts that have an order of their own.
        has_ledger: Whether a ledger was fitted too.
    """
    ledger = "A ledger spends means over the tokens of an answer. " if has_ledger else ""
    own = ", ".join(groups) or "none"
    text = f"""\
# A Buddy checkpoint

Buddy runs exactly as many Transformer blocks of this model as a budget allows. Blocks are chosen
by a router; the weights of `{name}` are untouched, so that full depth is that model's own.

## Routing

Removal orders were searched on answers (`buddy route`). Prompts with an order of their own: {own}.
{ledger}`record.json` beside this folder has every setting, and what routing gains.

{list_sources(sources)}
"""
    return Card(text=f"{text}\n{TO_STATE}", facts=base_facts(name))


def base_facts(base: str) -> dict[str, Any]:
    """What a card says of a checkpoint for machines; `base` as a recipe names the base model."""
    return {"base_model": base, "library_name": "buddy-llm", "license": "unknown"}


def list_sources(sources: Sequence[Source]) -> str:
    """Where rows come from, a line each."""
    lines = []
    for source in sources:
        end = "the end" if source.stop is None else source.stop
        often = f", {source.repeat} times" if source.repeat > 1 else ""
        lines.append(f"- `{source.hub or source.path}`, rows {source.start} to {end}{often}")
    return "\n".join(lines)
