"""DASH as the registry finds it."""

from buddy.policies.registry import Method

METHOD = Method(
    label="DASH",
    policy=".policy:DashPolicy",
    part=".policy:DashPart",
    recipe="buddy.methods.gated.recipe:GatedRecipe",
    train="buddy.methods.gated.run:train_gated",
    keeps_budget=False,
)
