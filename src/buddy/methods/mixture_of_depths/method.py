"""Mixture-of-Depths as the registry finds it."""

from buddy.policies.registry import Method

METHOD = Method(
    label="Mixture-of-Depths",
    policy=".policy:MixtureOfDepthsPolicy",
    part=".policy:MixtureOfDepthsRouters",
    recipe="buddy.methods.gated.recipe:GatedRecipe",
    train="buddy.methods.gated.run:train_gated",
    keeps_budget=False,
)
