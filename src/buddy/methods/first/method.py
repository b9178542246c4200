"""FiRST as the registry finds it."""

from buddy.policies.registry import Method

METHOD = Method(
    label="FiRST",
    policy=".policy:FirstPolicy",
    part=".policy:FirstRouters",
    recipe="buddy.methods.gated.recipe:GatedRecipe",
    train=".run:train_first",
    keeps_budget=False,
)
