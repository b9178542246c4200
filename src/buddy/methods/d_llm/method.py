"""D-LLM as the registry finds it."""

from buddy.policies.registry import Method

METHOD = Method(
    label="D-LLM",
    policy=".policy:DLLMPolicy",
    part=".policy:DLLMRouters",
    recipe="buddy.methods.gated.recipe:GatedRecipe",
    train="buddy.methods.gated.run:train_gated",
    keeps_budget=False,
)
