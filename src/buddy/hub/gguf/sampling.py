"""How the makers of a GGUF file want tokens to be drawn: the keys `general.sampling.*`."""

from typing import Any, Final

from buddy.errors import CheckpointError
from buddy.hub.gguf.header import GgufHeader
from buddy.settings import Range

_PREFIX: Final = "general.sampling."
_NAMES: Final = {
    "temp": ("temperature", Range(0, 100)),
    "top_k": ("top_k", Range(-1, 2**31 - 1)),
    "top_p": ("top_p", Range(above=0, high=1)),
    "min_p": ("min_p", Range(0, 1)),
    "penalty_repeat": ("repetition_penalty", Range(above=0, high=100)),
}
"""Their names, and transformers' with what each may be."""
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
    if stated.get("penalty_repeat", 1.0) == 1.0:
        idle.add("penalty_last_n")
    for name, value in stated.items():
        allowed = _NAMES[name][1] if name in _NAMES else None
        whole = int if name == "top_k" else (int, float)
        is_obeyed = allowed is not None and isinstance(value, whole) and value in allowed
        is_idle = any(name.startswith(group.partition("_prob")[0]) for group in idle)
        if not (is_obeyed or (allowed is None and is_idle)):
            what = f"expected {allowed}" if allowed else f"expected {', '.join(_NAMES)} alone"
            raise CheckpointError(
                f"{header.path} sets {_PREFIX}{name} to {str(value)[:80]}, which Buddy does not "
                f"do: {what}; convert the model again without it, or use its safetensors folder"
            )
    wishes = {_NAMES[name][0]: value for name, value in stated.items() if name in _NAMES}
    if "top_k" in wishes:
        wishes["top_k"] = max(0, wishes["top_k"])  # theirs is -1 for all
    if not wishes:
        return {}
    if wishes.get("temperature") == 0:  # what only sampling reads is refused beside it
        drawn = ("temperature", "top_k", "top_p", "min_p")
        return {"do_sample": False} | {n: v for n, v in wishes.items() if n not in drawn}
    return {"do_sample": True} | wishes
