"""What the registry finds; nothing else of this folder is imported to list it."""

from buddy.policies.registry import Method

METHOD = Method(
    label="Toy",
    policy=".policy:ToyPolicy",
    part=".policy:ToyPart",
    recipe=".recipe:ToyRecipe",
    train=".run:train_toy",
)
