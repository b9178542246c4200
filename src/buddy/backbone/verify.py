"""Does Buddy compute a model as transformers does? A row of the family table is a claim; this asks.

A model that scales or caps what its row says nothing of would load and be a little wrong, for
ever. So its own forward is compared with the steps that Buddy makes of it, on a few tokens.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.errors import CheckpointError, FamilyError, ModelError

NUM_TOKENS: Final = 16
_SPACING: Final = 7919
"""The distance of neighbouring token ids, before they are wrapped into the vocabulary: a prime."""
_ROUNDINGS: Final = 4
_LEAST: Final = 1e-5
"""Two passes over the same modules are equal bit for bit. Where attention or a product of matrices
picks another kernel for another shape, float32 sums run in another order, 1e-6 of the largest value
after some blocks; in half precision that is a few roundings of a last bit."""


@dataclass
class _Tap:
    """Takes what a block would cache, and hands it back."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values
        return keys, values


@torch.no_grad()
def verify_backbone(backbone: Backbone) -> None:
    """Compare a model's own forward with Buddy's steps, all blocks run, on 16 fixed tokens.

    Compared are the logits, and, block by block, the keys and values that are projected for a
    token that skips the block with those that the block makes of it.

    Args:
        backbone: Of a model in evaluation mode, with its weights; they are used as they are.

    Raises:
        FamilyError: They differ by more than the order of sums can explain.
        CheckpointError: They are NaN or infinite: the weights are damaged.
        ModelError: The model is in training mode, where dropout makes two passes differ.
    """
    if backbone.blocks.training:
        raise ModelError("a model in training mode cannot be verified: call its eval() first")
    vocabulary = backbone.embedding.num_embeddings
    token_ids = (_SPACING * torch.arange(1, NUM_TOKENS + 1, device=backbone.device)) % vocabulary
    theirs = backbone.own_logits(token_ids[None])
    if not bool(theirs.isfinite().all()):
        raise CheckpointError(
            f"this {backbone.family.title} model's logits are not finite, so its weights are "
            f"damaged, or too large for {backbone.dtype}: fetch or copy the model again, or load "
            "it with dtype=torch.float32"
        )
    positions = torch.arange(NUM_TOKENS, device=backbone.device)[None]
    hidden = backbone.embed(token_ids[None])
    rotary = backbone.rotary(hidden, positions)
    distance = positions[0][:, None] - positions[0]
    for block, window in enumerate(backbone.windows):
        mask = None
        if window is not None and window < NUM_TOKENS:
            mask = ((distance >= 0) & (distance < window))[None, None]
        tap = _Tap()
        keys, values = backbone.project(block, hidden[0], positions[0])
        hidden = backbone.run_block(block, hidden, mask, positions, rotary, tap)
        assert tap.keys is not None
        assert tap.values is not None
        for name, projected, made in (("keys", keys, tap.keys), ("values", values, tap.values)):
            cached = made[0].transpose(0, 1).to(projected.device)
            _compare(backbone, f"{name} of block {block}", projected, cached)
    _compare(backbone, "logits", backbone.logits(hidden), theirs)


def _compare(
    backbone: Backbone, what: str, ours: Float[Tensor, "*shape"], theirs: Float[Tensor, "*shape"]
) -> None:
    """Refuse a difference that is more than rounding; where transformers overflows, so may we."""
    allowed = max(_LEAST, _ROUNDINGS * torch.finfo(theirs.dtype).eps) * float(theirs.abs().max())
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = (ours.float() - theirs.float()).abs().masked_fill(same, 0)
    difference = float(apart.max())
    if not (same.all() or difference <= allowed):
        model_type = backbone.config.model_type
        raise FamilyError(
            f"Buddy does not compute this {backbone.family.title} model as transformers does: its "
            f"{what} differ by up to {difference:.3g}, expected at most {allowed:.3g}; "
            f"correct the row {model_type!r} of FAMILIES in buddy/backbone/families.py, or report "
            "the model, and meanwhile use one of another family"
        )
