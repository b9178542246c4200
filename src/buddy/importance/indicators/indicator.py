"""What an indicator is: takes in windows batch by batch, gives a number a block, can be resumed."""

import importlib
from typing import Final, Protocol, cast, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.errors import PolicyError


@runtime_checkable
class Gatherer(Protocol):
    """Takes in windows of text batch by batch, and can be resumed."""

    def update(self, ids: Int[Tensor, "batch tokens"]) -> None:
        """Take in one batch of windows without pads."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All that was gathered so far; `restore` takes it back.

        Of nothing, it has the same tensors; one with a row for each window has none, and what is
        not known yet has length 0.
        """
        ...

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from an earlier `state`."""
        ...


@runtime_checkable
class Indicator(Gatherer, Protocol):
    """Importance of each block, measured over windows of text."""

    def scores(self) -> Float[Tensor, " blocks"]:
        """Larger = more important, float64."""
        ...


INDICATORS: Final = {
    "delta-ppl": "buddy.importance.indicators.skipping:DeltaPerplexity",
    "taylor": "buddy.importance.indicators.gradient:Taylor",
    "fisher": "buddy.importance.indicators.gradient:Fisher",
    "grad-norm": "buddy.importance.indicators.gradient:GradientNorm",
    "cosine": "buddy.importance.indicators.cosine:SummaryCosine",
    "block-influence": "buddy.importance.indicators.cosine:BlockInfluence",
}
"""Name -> `module:class`; imported only when asked for."""


def build_indicator(name: str, backbone: Backbone) -> Indicator:
    """Make an indicator by name.

    Raises:
        PolicyError: There is none of that name.
    """
    if name not in INDICATORS:
        raise PolicyError(f"no indicator {name!r}: expected one of {', '.join(INDICATORS)}")
    module, _, attribute = INDICATORS[name].partition(":")
    return cast(Indicator, getattr(importlib.import_module(module), attribute)(backbone))
