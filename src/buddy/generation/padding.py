"""Pads on either side, moved to the left, where generation wants them."""

import torch
from jaxtyping import Int
from torch import Tensor


def left_padded(
    token_ids: Int[Tensor, "batch tokens"], mask: Int[Tensor, "batch tokens"], start: int = 0
) -> tuple[Int[Tensor, "batch tokens"], Int[Tensor, "batch tokens"]]:
    """Turn each row, from a column on, until its last column is a real token.

    Args:
        token_ids: Rows with pads on either side.
        mask: 0 = pad; each row has at least one real token from that column on.
        start: The column: those before are a session's, and stay where they are.
    """
    column = torch.arange(token_ids.shape[1], device=token_ids.device)
    last = (mask.bool() * column).argmax(1)  # [B], the last real column
    turned = start + (column - start + last[:, None] - start + 1) % (len(column) - start)
    turned = torch.where(column < start, column, turned)
    return token_ids.gather(1, turned), mask.gather(1, turned)
