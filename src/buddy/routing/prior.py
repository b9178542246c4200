"""Normalisation of importance indicators into the router's prior."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from buddy.errors import PolicyError
from buddy.settings import Range, check_ranges

HeavyTail = Literal["log", "box-cox", "none"]
Squash = Literal["rank", "sigmoid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PriorConfig:
    """The normalisation pipeline, step by step."""

    heavy_tail: HeavyTail = "none"
    """`log(1 + x)`, Box-Cox `(x^lambda - 1) / lambda`, or nothing (for cosine, which has no heavy
    tail)."""
    box_cox_lambda: Annotated[float, Range(above=0, high=10)] = 0.3
    """Exponent of Box-Cox, 0.2 to 0.5 in the paper."""
    clip: Annotated[float, Range(above=0, high=1e6)] | None = None
    """Robust z scores beyond plus or minus this are clipped, 2.5 to 3.5 in the paper."""
    squash: Squash = "rank"
    """`(1 + rank) / (L + 1)`, or `sigmoid(z / tau)`."""
    tau: Annotated[float, Range(above=0, high=1e6)] = 1.0
    """Temperature of the sigmoid, 1 to 2 in the paper."""
    standardise: bool = True
    """Subtract the mean and divide by the standard deviation, last."""

    def __post_init__(self) -> None:
        for name, choices in (("heavy_tail", HeavyTail), ("squash", Squash)):
            if getattr(self, name) not in get_args(choices):
                raise PolicyError(
                    f"{name} must be one of {', '.join(get_args(choices))}, "
                    f"got {getattr(self, name)!r}"
                )
        check_ranges(self, PolicyError)


def normalise_prior(
    importance: Float[Tensor, " blocks"], config: PriorConfig | None = None, *, eps: float = 1e-6
) -> Float[Tensor, " blocks"]:
    """Turn raw importance into a prior: larger = keep, comparable across indicators.

    Args:
        importance: One number per block, larger = more important; below zero counts as zero.
        config: The steps; the default suits cosine importance.
        eps: Keeps a division by a zero spread finite.

    Raises:
        PolicyError: A number is NaN or infinite.

    Source: paper, section 4.2.2 (steps i to iv and the closing standardisation).
    """
    config = config or PriorConfig()
    x = importance.double()
    if not bool(x.isfinite().all()):
        raise PolicyError("importance has a NaN or an infinite entry: measure it again")
    if len(x) == 0:  # a model of two blocks has none between them
        return x.float()
    x = x.clamp(min=0)
    if config.heavy_tail == "log":
        x = x.log1p()
    elif config.heavy_tail == "box-cox":
        x = (x**config.box_cox_lambda - 1) / config.box_cox_lambda
    q25, median, q75 = torch.quantile(x, torch.tensor([0.25, 0.5, 0.75], dtype=x.dtype))
    z = (x - median) / (q75 - q25 + eps)
    if config.clip is not None:
        z = z.clamp(-config.clip, config.clip)
    if config.squash == "rank":
        # Of what came in: clipping makes no ties. Of equals the deeper goes first, as in any order.
        rank = (len(x) - 1 - importance.double().flip(0).argsort(stable=True)).argsort()
        u = (1 + rank.double()) / (len(z) + 1)
    else:
        u = torch.sigmoid(z / config.tau)
    if config.standardise:
        u = (u - u.mean()) / (u.std(correction=0) + eps)
    prior: Tensor = u.float()
    return prior
