"""What `buddy train` reads where a recipe says `method = "toy"`."""

from dataclasses import dataclass, field

from buddy.training.recipe import DataSettings, ModelSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyRecipe:
    """All that fixes a run."""

    data: DataSettings
    """Rows."""
    model: ModelSettings = field(default_factory=ModelSettings)
    """Base model."""
    seed: int = 0
    """Seed of the draw."""
