"""How the makers of a GGUF file want tokens to be drawn: the keys `general.sampling.*`."""

import math
from typing import Any, Final

from buddy.errors import CheckpointError
from buddy.hub.gguf.header import GgufHeader

_PREFIX: Final = "general.sampling."
_NAMES: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Theirs, and transformers'."""
_NEUTRAL: Final = {"mirostat": 0, "xtc_probability": 0.0}
"""Values under which a key that Buddy does not obey changes nothing, nor do those beside it."""


def sampling_wishes(header: GgufHeader) -> dict[str, Any]:
    """The wishes as fields of a `GenerationConfig`; empty where the file has none.

    Raises:
        CheckpointError: The file asks for a way to draw tokens that Buddy does not have.
    """
    stated = {
        key.removeprefix(_PREFIX): value
        for key, value in header.metadata.items()
        if key.startswith(_PREFIX)
    }
    idle = {name for name, value in _NEUTRAL.items() if stated.get(name, value) == value}
    for name, value in stated.items():
        is_number = type(value) in (int, float) and math.isfinite(value)
        is_idle = any(name.startswith(group.partition("_")[0]) for group in idle)
        if (name in _NAMES and not is_number) or not (name in _NAMES or is_idle):
            raise CheckpointError(
                f"{header.path} sets {_PREFIX}{name} to {str(value)[:80]}, which Buddy does not "
                f"do: expected numbers for {', '.join(_NAMES)} alone; convert the model again "
                "without it, or use its safetensors folder"
            )
    wishes = {_NAMES[name]: value for name, value in stated.items() if name in _NAMES}
    if not wishes:
        return {}
    if wishes.get("temperature", 1) <= 0:
        del wishes["temperature"]
        return {"do_sample": False} | wishes
    return {"do_sample": True} | wishes
