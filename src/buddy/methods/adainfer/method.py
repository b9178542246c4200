"""AdaInfer as the registry finds it."""

from buddy.policies.registry import Method

METHOD = Method(
    label="AdaInfer",
    policy=".policy:AdaInferPolicy",
    part=".policy:AdaInferClassifier",
    recipe=".recipe:AdaInferRecipe",
    train=".run:train_adainfer",
    keeps_budget=False,
)
