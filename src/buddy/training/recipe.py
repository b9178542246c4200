"""Settings that the recipes of several stages share: the model, its rows, ranges of numbers."""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from buddy.backbone.nf4 import FrozenFormat
from buddy.data.examples import Source
from buddy.errors import RecipeError
from buddy.settings import Range, RecipeTable

SHARE: Final = Range(0, 1)
STEPS: Final = Range(1, 10**9)
LEARNING_RATE: Final = Range(above=0, high=1)
WEIGHT_DECAY: Final = Range(0, 100)
BATCH_SIZE: Final = Range(1, 4096)
ROWS: Final = Range(1, 10**6)
RUN_SEED: Final = Range(0, 2**32 - 1)
"""Each step has a seed of its own, a multiple of the run's, and 64 bits must hold it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """The base model."""

    name: str = "smollm2-135m"
    """Preset, hub id, folder or GGUF file."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Numbers of the frozen backbone; adapters and router are float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedModelSettings(ModelSettings):
    """The base model that adapters are put on."""

    quant: FrozenFormat | None = None
    """`nf4` holds the weights of the blocks' linear layers in 4 bits, by bitsandbytes: QLoRA. As
    `dtype` says if not set, which is also what is computed in, and what the rest is in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings(RecipeTable):
    """Training and validation rows."""

    train: tuple[Source, ...]
    """Where the training rows come from."""
    validation: tuple[Source, ...] = ()
    """Rows that are never trained on, for the evaluation while training."""
    max_tokens: Annotated[int, Range(2, 2**24)] = 256
    """Longest example, prompt and answer together; the model's context at most."""

    def __post_init__(self) -> None:
        RecipeTable.__post_init__(self)
        if not self.train:
            raise RecipeError("train has no source: name at least one file or data set")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLogSettings(RecipeTable):
    """What is written while a training takes steps."""

    every: Annotated[int, STEPS] = 10
    """Steps of one line of the log."""
    save_every: Annotated[int, STEPS] = 100
    """Steps between two training states, from which a run can go on."""
    tensorboard: bool = True
    """Write TensorBoard events beside the JSON lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """What `buddy train` made; none of it is trained any more."""

    name: str
    """A Buddy checkpoint with a router."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Numbers of the backbone."""
