"""What a training step needs of a card, as a table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from buddy.cli.views.tables import plain_table, show_table

if TYPE_CHECKING:
    from rich.console import Console

    from buddy.training.router.memory import StepMemory
    from buddy.training.router.recipe import Recipe

CARDS: Final = (16, 24, 40, 48, 80, 141, 192)
"""Memory of cards that are sold, in GB."""
_SPARE: Final = 0.1
"""Share of a card that is left for the CUDA context, kernels, and memory in fragments."""


def show_memory(
    console: "Console", recipe: "Recipe", plan: "StepMemory", depths: Sequence[int]
) -> None:
    """Print the parts of a step's memory, and what it comes to by tokens at once and depth.

    Args:
        console: Where to.
        recipe: Of the run.
        plan: Its step's memory.
        depths: Blocks that a token runs at most, and others to compare, from the most to the least.
    """
    optim, longest = recipe.optim, recipe.data.max_tokens
    console.print(
        f"{recipe.model.name}: {optim.batch_size} examples of up to {longest:,} tokens a step",
        style="bold",
        markup=False,
    )
    quant = recipe.model.quant
    numbers = recipe.model.dtype if quant is None else f"{quant} and {recipe.model.dtype}"
    shared = ": a share of the blocks, and two that are gathered" if optim.fsdp else ""
    about = {
        "weights": (plan.weights, f"frozen, in {numbers}{shared}"),
        "adapters, router": (plan.adapters, "with gradients and AdamW's moments, in float32"),
        "head": (plan.head, "logits of the positions that the loss holds at once"),
    }
    if plan.widened > 0:
        about["widened"] = (plan.widened, "the largest layer of 4 bits, where that is more")
    for name, (num_bytes, what) in about.items():
        console.print(f"  {name:<16} {_gb(num_bytes):>7} GB  {what}", markup=False)
    console.print()
    table = plain_table("In all, in GB, by tokens computed at once")
    table.add_column("tokens", justify="right", no_wrap=True)
    for depth in depths:
        table.add_column(f"{depth} blocks", justify="right", no_wrap=True)
    table.add_column("card", justify="right", no_wrap=True)
    table.add_column("checkpointed", justify="right", no_wrap=True)
    table.add_column("card", justify="right", no_wrap=True)
    for tokens in _at_once(recipe):
        less = plan.peak(tokens, depths[0], checkpointing=True)
        table.add_row(
            f"{tokens:,}",
            *(_gb(plan.peak(tokens, depth)) for depth in depths),
            _card(plan.peak(tokens, depths[0])),
            _gb(less),
            _card(less),
        )
    show_table(console, table)
    console.print(
        "\ncard: the smallest, in GB, that has a tenth to spare. Fewer tokens at once: "
        "optim.micro_batch_tokens; checkpointed: optim.activation_checkpointing.",
        style="dim",
    )


def _at_once(recipe: "Recipe") -> list[int]:
    """Tokens of a batch of the longest rows, and its halves down to one example."""
    row = recipe.plans * recipe.data.max_tokens
    sizes = {recipe.optim.batch_size * row, recipe.optim.micro_batch_tokens or row, row}
    size = recipe.optim.batch_size * row // 2
    while size > row:
        sizes.add(size // row * row)
        size //= 2
    return sorted(sizes, reverse=True)


def _card(num_bytes: int) -> str:
    return next((f"{card}" for card in CARDS if num_bytes <= (1 - _SPARE) * card * 1e9), "none")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f}"
