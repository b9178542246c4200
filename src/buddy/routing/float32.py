"""Modules that stay in float32 whatever becomes of the model around them."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Float32Module(nn.Module):
    """Keeps its dtype under `model.to(bfloat16)`, as one ulp of a score can change a plan.

    Devices still move. Autocast is for the subclass to turn off.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Float32Module":
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]  # torch's own
        return self


class LowRank(Float32Module):
    """Linear, SiLU, Linear; the last layer starts at zero.

    Args:
        width: Of what is read.
        rank: Width of the hidden layer.
        outputs: Numbers that come out.
    """

    def __init__(self, width: int, rank: int, outputs: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, dtype=torch.float32)
        self.up = nn.Linear(rank, outputs, dtype=torch.float32)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, summary: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch outputs"]:
        """What comes out, in float32 whatever the model's dtype."""
        # Not under autocast either: one ulp of a score can change a plan.
        with torch.autocast(summary.device.type, enabled=False):
            outputs: Tensor = self.up(nn.functional.silu(self.down(summary.float())))
        return outputs
