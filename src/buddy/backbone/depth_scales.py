"""Adapters that know the depth: each rank of a LoRA layer has a scale, by the blocks a token runs.

    y = W x + B (s(depth) * A x)

The scale is piecewise linear in the depth, between a few depths that have numbers of their own, and
1 before training. Keys and values have none: what a token leaves in a block's cache is then a
function of its residual alone, whoever reads it and whenever it is made. Nor has the first block,
which runs before a plan is known.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, cast

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.errors import ModelError
from buddy.routing.float32 import Float32Module
from buddy.settings import Range, check_ranges

_shares: ContextVar[Tensor | None] = ContextVar("shares", default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthScalesConfig:
    """What gives scales by depth their shapes; JSON in a checkpoint."""

    depths: tuple[int, ...]
    """Blocks at which each rank has a number of its own, rising."""
    layers: Annotated[int, Range(1, 10**6)]
    """Linear layers that have scales."""
    rank: Annotated[int, Range(1, 4096)]
    """Rank of their adapters."""

    def __post_init__(self) -> None:
        check_ranges(self, ModelError)
        depths = list(self.depths)
        if len(depths) < 2 or depths[0] < 1 or depths != sorted(set(depths)):
            raise ModelError(
                "adapters know the depth by at least two numbers of blocks, rising, got "
                f"{self.depths}"
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values only."""
        return {**asdict(self), "depths": list(self.depths)}


class DepthScales(Float32Module):
    """The scales of all adapters of a model.

    Args:
        config: Their shapes.

    Attributes:
        weight: [layers, depths, rank], how far each scale is from 1.
    """

    def __init__(self, config: DepthScalesConfig) -> None:
        super().__init__()
        self.config = config
        shape = config.layers, len(config.depths), config.rank
        self.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float32))

    def shares(self, blocks: NDArray[np.int64]) -> Float[Tensor, "*shape depths"]:
        """How much of its number at each of the depths a token's scale is made of.

        Args:
            blocks: That each token runs.
        """
        most = self.config.depths[-1]
        return _all_shares(self.config.depths)[torch.from_numpy(blocks).clamp(max=most)]

    def of(self, layer: int) -> Float[Tensor, "*shape rank"]:
        """How far from 1 the scales of a layer are, for the tokens that it is given now.

        Raises:
            ModelError: The pass does not say how many blocks its tokens run.
        """
        shares = _shares.get()
        if shares is None:
            raise unknown_depth()
        return shares.to(self.weight.device) @ self.weight[layer]

    @torch.no_grad()
    def table(self, layer: int) -> Float[Tensor, "blocks rank"]:
        """How far from 1 the scales of a layer are, by depth from 0 to the largest of its own."""
        return _all_shares(self.config.depths).to(self.weight.device) @ self.weight[layer]


@lru_cache(maxsize=8)
def _all_shares(depths: tuple[int, ...]) -> Float[Tensor, "blocks depths"]:
    """Give each depth from 0 on its share of the numbers below and above it; the ends go on."""
    every = np.arange(depths[-1] + 1)
    columns = [np.interp(every, depths, one) for one in np.eye(len(depths))]
    return torch.from_numpy(np.stack(columns, 1)).float()


def unknown_depth() -> ModelError:
    """What a pass is refused with that has no plan."""
    return ModelError(
        "this model's adapters know how many blocks a token runs, and this pass does not say it: "
        "expected a pass under a plan; use a model that was trained without lora.depths"
    )


@contextmanager
def depths_known(shares: Float[Tensor, "*shape depths"] | None) -> Iterator[None]:
    """Let adapters know the depth of the tokens that they are given, within the context.

    Args:
        shares: As `DepthScales.shares` gives them, in the shape of the tokens; None = not known.
    """
    token = _shares.set(shares)
    try:
        yield
    finally:
        _shares.reset(token)


def scaled_layers(backbone: Backbone) -> dict[str, nn.Module]:
    """Linear layers that may have scales, by name within the blocks, in the order of their numbers.

    An adapter around a layer stands for it.
    """
    found: dict[str, nn.Module] = {}
    for block in range(1, backbone.num_blocks):
        plain = backbone.key_projection(block), backbone.value_projection(block)
        for name, module in backbone.blocks[block].named_modules():
            path = f"{block}.{name}"
            is_inner = any(path.startswith(f"{outer}.") for outer in found)
            is_linear = hasattr(module, "in_features") and hasattr(module, "out_features")
            if is_linear and not is_inner and not _is_part_of(module, plain):
                found[path] = module
    return found


def _is_part_of(module: nn.Module, layers: Sequence[nn.Module]) -> bool:
    return any(module is part for layer in layers for part in layer.modules())


def attach_scales(backbone: Backbone, scales: DepthScales) -> None:
    """Let the adapters of a model scale their ranks.

    Args:
        backbone: With plain LoRA, of one adapter, on every layer that may have scales.
        scales: Of these layers.

    Raises:
        ModelError: They are of other layers, or of another rank.
    """
    layers = list(scaled_layers(backbone).values())
    downs = [_down(layer) for layer in layers]
    fits = len(layers) == scales.config.layers and all(
        down is not None and down.out_features == scales.config.rank for down in downs
    )
    if not fits:
        raise ModelError(
            f"scales by depth are of {scales.config.layers} adapters of rank {scales.config.rank}, "
            "and this model's adapters are others"
        )
    for place, (layer, down) in enumerate(zip(layers, downs, strict=True)):
        cast(Any, layer).scales_by_depth = partial(scales.of, place)
        assert down is not None
        down.register_forward_hook(partial(_scaled, scales, place))


def _down(layer: Any) -> nn.Linear | None:
    sides = getattr(layer, "lora_A", {})
    return next(iter(sides.values())) if len(sides) == 1 else None


def _scaled(scales: DepthScales, place: int, module: Any, inputs: Any, output: Tensor) -> Tensor:
    """What the first matrix of an adapter makes, each rank scaled."""
    return output * (1 + scales.of(place)).to(output)


class DepthLinear(nn.Module):
    """A linear layer with an adapter merged at a scale of 1, and what other scales add to it.

    Args:
        base: With the adapter merged.
        down: The adapter's first matrix.
        up: Its second, times the adapter's own scale.
        scales: Of all adapters.
        layer: Which of them it is.
    """

    def __init__(
        self,
        base: nn.Module,
        down: Float[Tensor, "rank columns"],
        up: Float[Tensor, "rows rank"],
        scales: DepthScales,
        layer: int,
    ) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = (nn.Parameter(part, requires_grad=False) for part in (down, up))
        self.in_features, self.out_features = down.shape[1], up.shape[0]
        self._scales = (scales, layer)  # not a part of this layer: there is one of all

    def forward(self, x: Float[Tensor, "*shape columns"]) -> Float[Tensor, "*shape rows"]:
        """Multiply, for tokens whose depth the pass says."""
        scales, layer = self._scales
        low = nn.functional.linear(x, self.down) * scales.of(layer).to(x)
        added: Tensor = self.base(x) + nn.functional.linear(low, self.up)
        return added

    def table(self) -> Float[Tensor, "blocks rank"]:
        """How far from 1 its scales are, by depth."""
        scales, layer = self._scales
        return scales.table(layer)


def is_merged(model: nn.Module) -> bool:
    """Whether a model has adapters merged that know the depth."""
    return any(isinstance(layer, DepthLinear) for layer in model.modules())
