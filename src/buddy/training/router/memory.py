"""What a training step needs of a card's memory, by arithmetic, before any weight is fetched.

One block is run on PyTorch's meta device, which computes shapes and no numbers, and what autograd
would keep of it is counted. Attention keeps what a flash kernel keeps: queries, keys, values, its
output and a number for each query. Not counted: the CUDA context, fragments between blocks of
memory, and what a kernel needs while it runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from buddy.backbone.backbone import Backbone
from buddy.backbone.nf4 import layers_to_freeze, nf4_bytes
from buddy.model import BuddyForCausalLM
from buddy.training.adapters import fast_adapters
from buddy.training.losses import HEAD_TOKENS
from buddy.training.router.budgets import budget_range
from buddy.training.router.lora import add_lora
from buddy.training.router.model import new_router
from buddy.training.router.recipe import OWN_TEACHER, Recipe

_NAME: Final = "buddy_outline"
_TOKENS: Final = (256, 512)
"""Two lengths, between which what a token costs and what a block costs are told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes that a step needs.

    Attributes:
        weights: The frozen model's, in its own number format or 4 bits; the teacher's too, if
            another. Where processes hold shares of the blocks: this one's share, and two blocks
            that are gathered.
        widened: The largest layer of a 4-bit base, while it is multiplied by.
        adapters: Trained parameters, their gradients, AdamW's two moments, and their mean where the
            recipe keeps one: all in float32.
        head: Logits of the positions that the loss holds at once, and their gradient.
        run: What a block that runs keeps of each token for the backward pass.
        checkpointed: The same with activation checkpointing.
        skipped: What a skipped block keeps of each token: for its gate, and, where tokens of a row
            differ in depth, for the keys and values that it leaves.
        fixed: What a block keeps whatever the tokens are.
        num_blocks: Blocks of the model.
    """

    weights: int
    widened: int
    adapters: int
    head: int
    run: float
    checkpointed: float
    skipped: float
    fixed: float
    num_blocks: int

    def activations(self, tokens: int, blocks: int, *, checkpointing: bool = False) -> int:
        """Bytes that the forward pass keeps of `tokens` tokens at a depth of `blocks`.

        With checkpointing they include those of one block, which is computed again as a whole.
        """
        skipped = tokens * (self.num_blocks - blocks) * self.skipped
        if checkpointing:
            whole = tokens * self.run + self.fixed
            return round(skipped + tokens * blocks * self.checkpointed + whole)
        return round(skipped + blocks * (tokens * self.run + self.fixed))

    def peak(self, tokens: int, blocks: int, *, checkpointing: bool = False) -> int:
        """Bytes that a step needs at once: weights, adapters, activations, and the head's.

        What is widened of a 4-bit base is not needed while the head computes.
        """
        kept = self.activations(tokens, blocks, checkpointing=checkpointing)
        return self.weights + self.adapters + max(self.head, self.widened) + kept


def plan_memory(recipe: Recipe, processes: int = 1) -> StepMemory:
    """The memory of a recipe's step, from the configuration of its models alone.

    Args:
        recipe: Of the run.
        processes: That share each batch.

    Raises:
        BuddyError: The model is not supported, or a setting does not fit it.
    """
    dtype = getattr(torch, recipe.model.dtype)
    outline, *teacher = (
        BuddyForCausalLM.outline(name, policy="full")
        for name in (recipe.model.name, recipe.teacher.name)
        if name not in (None, OWN_TEACHER)
    )
    weights = sum(_num_bytes(frozen.model.to(dtype)) for frozen in (outline, *teacher))
    widened = 0
    if recipe.model.quant is not None:
        layers = [layer.weight for layer in layers_to_freeze(outline.backbone).values()]
        weights += sum(nf4_bytes(weight.numel()) - weight.nbytes for weight in layers)
        widened = max(weight.nbytes for weight in layers)
    if recipe.optim.fsdp:
        blocks = _num_bytes(outline.backbone.blocks)
        kept = min(1.0, 1 / processes + 2 / outline.num_blocks)
        weights -= round(blocks * (1 - kept))
    adapted = add_lora(outline.model.train(), recipe.lora, recipe.optim.seed)
    model = BuddyForCausalLM(adapted, policy="full")
    backbone = model.backbone
    trained = sum(p.numel() * 4 for p in adapted.parameters() if p.requires_grad)
    if recipe.router.policy == "routed":
        with torch.device("meta"):
            trained += sum(p.numel() * 4 for p in new_router(recipe, backbone, None).parameters())
    copies = 5 if recipe.optim.average > 0 else 4
    with _as_flash(backbone), fast_adapters(backbone):
        run, fixed = _line(lambda tokens: _kept(model, tokens, _run_block))
        left, _ = _line(lambda tokens: _kept(model, tokens, _skip_block))
    hidden = backbone.config.hidden_size * dtype.itemsize
    gate = hidden if _has_gates(recipe) else 0
    vocabulary = backbone.config.vocab_size
    return StepMemory(
        weights=weights,
        widened=widened,
        adapters=copies * trained,
        # The logits, log-probabilities and slopes in float32, and the slopes as the model has them.
        head=HEAD_TOKENS * vocabulary * (2 * dtype.itemsize + 4),
        run=run + gate,
        checkpointed=float(hidden + gate),
        skipped=gate + (left if _differ_in_row(recipe) else 0.0),
        fixed=fixed,
        num_blocks=backbone.num_blocks,
    )


def highest_budget(recipe: Recipe, num_blocks: int) -> int:
    """The most blocks that a token of a step may run."""
    return (
        num_blocks
        if recipe.budget.full_prompts > 0
        else max(budget_range(recipe.budget, num_blocks))
    )


def _has_gates(recipe: Recipe) -> bool:
    """Whether each block keeps what it did, for the gradient of its gate."""
    learns = recipe.optim.router_learning_rate != 0 and recipe.router.policy == "routed"
    return learns and recipe.router.method == "straight-through"


def _differ_in_row(recipe: Recipe) -> bool:
    """Whether tokens of one row may run different blocks, and so see what others skipped."""
    return recipe.budget.full_prompts > 0 or recipe.router.second_route > 0


def _num_bytes(model: nn.Module) -> int:
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def _line(measured: Callable[[int], int]) -> tuple[float, float]:
    """Bytes for each token, and those that are none of a token's."""
    few, many = _TOKENS
    slope = (measured(many) - measured(few)) / (many - few)
    return slope, measured(few) - few * slope


def _kept(model: BuddyForCausalLM, tokens: int, work: Callable[..., Any]) -> int:
    """Bytes that autograd keeps of some work on so many tokens, weights apart."""
    weights = (*model.model.parameters(), *model.model.buffers())
    own = {tensor.untyped_storage()._cdata for tensor in weights}
    kept: dict[int, Tensor] = {}
    backbone = model.backbone

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    hidden = torch.empty(
        1, tokens, backbone.config.hidden_size, dtype=model.dtype, device="meta"
    ).requires_grad_()
    positions = torch.arange(tokens, device="meta")[None]
    rotary = backbone.rotary(hidden, positions)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        work(backbone, hidden, positions, rotary)
    shared = own | {part.untyped_storage()._cdata for part in rotary}
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in shared)


def _run_block(backbone: Backbone, hidden: Tensor, positions: Tensor, rotary: Any) -> Tensor:
    return backbone.run_block(backbone.num_blocks // 2, hidden, None, positions, rotary, None)


def _skip_block(backbone: Backbone, hidden: Tensor, positions: Tensor, rotary: Any) -> Any:
    return backbone.project(backbone.num_blocks // 2, hidden[0], positions[0])


class _Flash(torch.autograd.Function):
    """Keeps what the backward pass of a flash kernel needs; computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        return out


def _flash(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> Any:
    return _Flash.apply(query, key, value).transpose(1, 2).contiguous(), None  # type: ignore[no-untyped-call]


@contextmanager
def _as_flash(backbone: Backbone) -> Iterator[None]:
    """Let the backbone attend by `_Flash`, within the context."""
    config = backbone.config
    before = config._attn_implementation
    AttentionInterface.register(_NAME, _flash)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
