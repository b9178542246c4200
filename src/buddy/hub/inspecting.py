"""A model's family and sizes, from its config alone: no weights are read."""

from pathlib import Path
from typing import Any

from buddy.backbone.backbone import Backbone
from buddy.depth.cost import ModelShape
from buddy.hub.loading import load_config
from buddy.hub.progress import Progress
from buddy.hub.weights import empty_model
from buddy.hub.wrap_errors import explained


def inspect_model(
    name: str | Path, *, on_progress: Progress | None = None
) -> tuple[str, ModelShape, int]:
    """Build the model on the meta device and count.

    Returns:
        The family's title, the shape, and the context in tokens.

    Raises:
        ModelError: It cannot be found or fetched.
        FamilyError: The family is not supported.
    """
    model = model_without_weights(name, on_progress=on_progress)
    with explained(f"{name} cannot be taken apart", "fetch or copy the model again"):
        backbone = Backbone(model)
    return backbone.family.title, backbone.shape(), backbone.context


def model_without_weights(name: str | Path, *, on_progress: Progress | None = None) -> Any:
    """A Hugging Face causal LM on the meta device, as its config describes it.

    Raises:
        ModelError: It cannot be found or fetched.
        FamilyError: The family is not supported.
    """
    return empty_model(load_config(name, on_progress=on_progress))
