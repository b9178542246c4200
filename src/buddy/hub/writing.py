"""Writes a model as transformers does, which refuses generation configs that contradict themselves.

One that is as its makers published it is written as it is, whatever it says.
"""

from pathlib import Path
from typing import Any

from buddy.hub.quiet import quiet_transformers
from buddy.hub.wrap_errors import explained


def write_model(model: Any, folder: Path, **options: Any) -> None:
    """Write config, generation config and weights.

    Args:
        model: Of transformers.
        folder: Made where it is missing.
        **options: Of its `save_pretrained`.

    Raises:
        CheckpointError: Its generation config was changed, and transformers does not write it.
        OSError: A file cannot be written.
    """
    advice = "correct model.generation_config"
    with quiet_transformers():
        with explained("the model's generation config cannot be written", advice, (OSError,)):
            model.generation_config.save_pretrained(folder)
        model.save_pretrained(folder, **options)
