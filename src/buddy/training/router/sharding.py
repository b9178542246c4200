"""A frozen base that no process holds whole: each keeps its share of every block, by FSDP2.

A plan skips blocks, and processes have different plans: where one of them left a gather out, the
others would wait for it for ever. So a pass gathers every block, in order, whether this process
runs it or not, and its backward pass does so in the reverse order; a process whose rows make fewer
passes goes along without rows. While a block runs, the next one is on its way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from buddy.backbone.backbone import Backbone
from buddy.backbone.memory import Release, keep
from buddy.errors import RecipeError
from buddy.hub.mapped_load import MappedWeights
from buddy.model import BuddyForCausalLM


class _Share(nn.Module):
    """A block as `fully_shard` takes it, whose own hooks are of a forward that nothing calls."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block


class ShardedBlocks:
    """The blocks of a backbone; of what is frozen in them, each process keeps a share.

    What is trained stays whole on every process. Beside its shares a process holds a block at a
    time, while it takes the share of that one.

    Args:
        backbone: Whose blocks they are; all processes have the same one.
        mesh: The processes, and their kind of device.
        place: Puts a frozen weight on this process's device.
        release: Told of each weight that was placed, once the share of it is taken.
    """

    def __init__(
        self,
        backbone: Backbone,
        mesh: DeviceMesh,
        place: Callable[[Tensor], Tensor] = lambda weight: weight,
        release: Release = keep,
    ) -> None:
        self._shares = [_share(block, mesh, place, release) for block in backbone.blocks]

    def enter(
        self, block: int, hidden: Float[Tensor, "lanes hidden"]
    ) -> Float[Tensor, "lanes hidden"]:
        """The residual that enters a block, once its weights are there; its backward frees them."""
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()  # or the backward pass would end before it
        return _Enter.apply(hidden, self, block)  # type: ignore[no-any-return, no-untyped-call]

    def leave(
        self, block: int, hidden: Float[Tensor, "lanes hidden"]
    ) -> Float[Tensor, "lanes hidden"]:
        """The residual that a block left, its weights freed; its backward gathers them."""
        return _Leave.apply(hidden, self, block)  # type: ignore[no-any-return, no-untyped-call]

    def accompany(self) -> None:
        """Go through a pass and its backward pass without rows, beside processes that have some."""
        num = len(self._shares)
        for block in range(num):
            self.gather(block, block + 1)
            self.free(block)
        for block in reversed(range(num)):
            self.gather(block, block - 1)
            self.free(block)

    @contextmanager
    def gathered(self, blocks: range) -> Iterator[None]:
        """Have the weights of some blocks, within the context; every process does so."""
        for block in blocks:
            self._shares[block].unshard()
        try:
            yield
        finally:
            for block in blocks:
                self.free(block)

    def gather(self, block: int, following: int) -> None:
        """Have a block's weights, and send for those of the following one, if there is one."""
        self._shares[block].unshard()
        if 0 <= following < len(self._shares):
            self._shares[following].unshard(async_op=True)

    def free(self, block: int) -> None:
        """Keep this process's share of a block alone."""
        self._shares[block].reshard()


def _share(
    block: nn.Module, mesh: DeviceMesh, place: Callable[[Tensor], Tensor], release: Release
) -> FSDPModule:
    """A block of whose frozen weights this process has placed a share."""
    trained = {p for p in block.parameters() if p.requires_grad}
    frozen = {p: p.data for p in block.parameters() if not p.requires_grad}
    for parameter, weight in frozen.items():
        parameter.data = place(weight)
    share = _Share(block)
    fully_shard(share, mesh=mesh, reshard_after_forward=False, ignored_params=trained)
    assert isinstance(share, FSDPModule)
    for weight in frozen.values():
        release(weight)
    return share


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, blocks: ShardedBlocks, block: int) -> Tensor:
        ctx.blocks, ctx.block = blocks, block
        blocks.gather(block, block + 1)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        ctx.blocks.free(ctx.block)
        return slope, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, blocks: ShardedBlocks, block: int) -> Tensor:
        ctx.blocks, ctx.block = blocks, block
        blocks.free(block)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        ctx.blocks.gather(ctx.block, ctx.block - 1)
        return slope, None, None


def shard(
    model: BuddyForCausalLM,
    device: torch.device,
    num_processes: int,
    dtype: torch.dtype,
    mapped: MappedWeights,
) -> ShardedBlocks:
    """Leave each process its share of a model's blocks; all else moves to its device, whole.

    Args:
        model: Built with `mapped`, the same on all processes.
        device: Of this process.
        num_processes: That share the blocks.
        dtype: Number format of the frozen weights from now on.
        mapped: Has mapped those that are in their files. All have memory of their own in the end,
            and the files' pages are given back block by block.

    Raises:
        RecipeError: The base would have to be saved whole.
    """
    is_rounded = dtype is torch.float16 and model.dtype is not torch.float16
    if is_rounded or model.origin.source is None:
        raise RecipeError(
            f"optim.fsdp: weights of {dtype} are not those that {model.config.name_or_path} "
            "was saved with, so the checkpoint would have to hold them whole, which no process "
            "does: set model.dtype to bfloat16 or float32"
        )
    mesh = init_device_mesh(device.type, (num_processes,))
    place = partial(torch.Tensor.to, device=device, dtype=dtype)
    sharded = ShardedBlocks(model.backbone, mesh, place, mapped.release)
    for weight in model.model.parameters():
        if not (weight.requires_grad or isinstance(weight, DTensor)):
            weight.data = place(weight.data, copy=True)
    for part in (model.model, model.router):
        for tensor in () if part is None else (*part.parameters(), *part.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(device)
    return sharded
