"""FlexiDepth as the registry finds it."""

from buddy.policies.registry import Method

METHOD = Method(
    label="FlexiDepth",
    policy=".policy:FlexiDepthPolicy",
    part=".policy:FlexiDepthPart",
    recipe="buddy.methods.gated.recipe:GatedRecipe",
    train="buddy.methods.gated.run:train_gated",
    keeps_budget=False,
)
