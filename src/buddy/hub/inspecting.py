"""A model's family and sizes, from its config alone: no weights are read."""

from pathlib import Path

from buddy.backbone.backbone import Backbone
from buddy.depth.cost import ModelShape
from buddy.hub.foreign import explained
from buddy.hub.loading import load_config
from buddy.hub.progress import Progress
from buddy.hub.weights import empty_model


def inspect_model(
    name: str | Path, *, on_progress: Progress | None = None
) -> tuple[str, ModelShape]:
    """Build the model on the meta device and count.

    Returns:
        The family's title and the shape.

    Raises:
        ModelError: It cannot be found or fetched.
        FamilyError: The family is not supported.
    """
    config = load_config(name, on_progress=on_progress)
    with explained(f"{name} cannot be taken apart", "fetch or copy the model again"):
        backbone = Backbone(empty_model(config))
        return backbone.family.title, backbone.shape()
