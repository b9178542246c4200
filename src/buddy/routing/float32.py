"""Float32Module: a module that stays in float32 whatever becomes of the model around it."""

from collections.abc import Callable

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
