"""PuDDing as the registry finds it."""

from buddy.policies.registry import Method

METHOD = Method(
    label="PuDDing",
    policy=".policy:PuddingPolicy",
    part=".policy:PuddingClassifier",
    recipe=".recipe:PuddingRecipe",
    train=".run:train_pudding",
)
