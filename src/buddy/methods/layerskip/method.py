"""LayerSkip as the registry finds it."""

from buddy.policies.registry import Method

METHOD = Method(
    label="LayerSkip",
    policy=".policy:LayerSkipPolicy",
    recipe=".recipe:LayerSkipRecipe",
    train=".run:train_layerskip",
)
