"""What `buddy train` reads where a recipe says `method = "toy"`."""

from dataclasses import dataclass, field

from buddy.training.recipe import ModelSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyRecipe:
    """All that fixes a run."""

    model: ModelSettings = field(default_factory=ModelSettings)
    """Base model."""
    seed: int = 0
    """Of the draw."""
