"""What a plan costs: FLOPs, weight bytes and KV bytes, from counts of parameters."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The counts that costs are made of."""

    num_blocks: int
    """Transformer blocks."""
    block_params: int
    """Parameters of one block (the mean, where blocks differ)."""
    outside_params: int
    """Parameters outside the blocks; tied embeddings count once."""
    head_params: int
    """Parameters of the output projection, which every step reads."""
    query_width: int
    """Attention heads times head size."""
    kv_width: int
    """KV heads times head size."""
    bytes_per_param: float
    """2 for bfloat16."""
    bytes_per_kv: float
    """Bytes of one cached number."""


def block_flops(shape: ModelShape, tokens: int, context: int) -> float:
    """FLOPs of one block over `tokens` new tokens that each see `context` positions.

    Two per parameter and token for the projections, and two products of `query_width` per
    position for attention (scores, then the weighted sum).
    """
    return 2.0 * tokens * shape.block_params + 4.0 * tokens * context * shape.query_width


def plan_flops(shape: ModelShape, blocks: int, tokens: int = 1, context: int = 1) -> float:
    """FLOPs of `tokens` new tokens at a depth of `blocks`, output projection included."""
    return blocks * block_flops(shape, tokens, context) + 2.0 * tokens * shape.head_params


def weight_bytes(shape: ModelShape, blocks: int) -> float:
    """Bytes of weights that one step reads at a depth of `blocks`, output projection included."""
    return (blocks * shape.block_params + shape.head_params) * shape.bytes_per_param


def kv_bytes_per_token(shape: ModelShape, blocks: int | None = None) -> float:
    """Bytes that one token leaves in the caches of `blocks` blocks; all of them by default."""
    return (
        2.0 * shape.kv_width * shape.bytes_per_kv * (shape.num_blocks if blocks is None else blocks)
    )


def decision_flops(
    *, batch: int, tokens: int, width: int, rank: int, num_blocks: int, pinned: int = 2
) -> float:
    """FLOPs of the Decision Module when each token is scored.

    Source: paper, overhead section: `F_DM = 2BTdr + 2BTr(L - I)`.
    """
    return 2.0 * batch * tokens * rank * (width + num_blocks - pinned)


def decision_share(
    shape: ModelShape, blocks: int, *, rank: int, tokens: int, context: int
) -> float:
    """FLOPs of the Decision Module as a share of those of the blocks that a budget runs.

    Args:
        shape: Of the model; the Decision Module reads a token's values, `kv_width` numbers.
        blocks: That run.
        rank: Width of the Decision Module.
        tokens: New tokens.
        context: Positions that each sees.

    Source: paper, overhead section.
    """
    decided = decision_flops(
        batch=1, tokens=tokens, width=shape.kv_width, rank=rank, num_blocks=shape.num_blocks
    )
    return decided / (blocks * block_flops(shape, tokens, context))
