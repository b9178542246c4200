"""Pads on either side, moved to the left, where generation wants them."""

import torch
from jaxtyping import Int
from torch import Tensor


def left_padded(
    token_ids: Int[Tensor, "batch tokens"], mask: Int[Tensor, "batch tokens"]
) -> tuple[Int[Tensor, "batch tokens"], Int[Tensor, "batch tokens"]]:
    """Turn each row until its last column is a real token.

    Args:
        token_ids: Rows with pads on either side.
        mask: 0 = pad; each row has at least one real token.
    """
    tokens = token_ids.shape[1]
    column = torch.arange(tokens, device=token_ids.device)
    last = (mask.bool() * column).argmax(1)  # [B], the last real column
    turned = (column + last[:, None] + 1) % tokens
    return token_ids.gather(1, turned), mask.gather(1, turned)
