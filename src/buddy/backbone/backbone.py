"""Backbone: a Hugging Face causal LM taken apart into the steps that a plan can skip."""

from operator import attrgetter
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from buddy.backbone.families import block_windows, find_family
from buddy.depth.cost import ModelShape
from buddy.errors import ModelError

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, [batch, tokens, head] each."""


def _rotate_half(x: Float[Tensor, "*shape head"]) -> Float[Tensor, "*shape head"]:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class Backbone:
    """The parts of a causal LM, by their role; runs one block at a time.

    Args:
        model: A Hugging Face causal LM of a supported family, with `sdpa` or `eager` attention.

    Raises:
        FamilyError: The family is not in the table.
        ModelError: The attention implementation takes no explicit mask.
    """

    def __init__(self, model: nn.Module) -> None:
        config = cast(Any, model.config)
        family = find_family(config)
        core = attrgetter(family.backbone)(model)
        self.config = config
        self.family = family
        self.blocks: nn.ModuleList = attrgetter(family.blocks)(core)
        self.num_blocks = len(self.blocks)
        self.windows = block_windows(config, family)
        self.embedding: nn.Embedding = attrgetter(family.embedding)(core)
        self._rotary: nn.Module = attrgetter(family.rotary)(core)
        self.final_norm: nn.Module = attrgetter(family.final_norm)(core)
        self.head: nn.Module = attrgetter(family.head)(model)
        self._model = model
        self.attention: str = config._attn_implementation
        if self.attention not in ("sdpa", "eager"):
            raise ModelError(
                f"attention {self.attention!r} takes no mask of its own for each block: "
                'expected "sdpa" or "eager"; load the model with attn_implementation="sdpa"'
            )
        head_dim = getattr(config, "head_dim", None)
        self.head_dim: int = head_dim or config.hidden_size // config.num_attention_heads
        self.kv_width: int = config.num_key_value_heads * self.head_dim
        self._grouped = config.num_attention_heads > config.num_key_value_heads

    def set_head(self, head: nn.Module) -> None:
        """Put another output projection in the place of the model's."""
        self.head = head
        setattr(self._model, self.family.head, head)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' number format."""
        return self.embedding.weight.dtype

    def embed(self, token_ids: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens hidden"]:
        """The residual that enters the first block."""
        return cast(Tensor, self.embedding(token_ids))

    def rotary(
        self, hidden: Float[Tensor, "*shape hidden"], positions: Int[Tensor, "batch tokens"]
    ) -> Rotary:
        """Cosines and sines of the positions, in the dtype of `hidden`."""
        return cast(Rotary, self._rotary(hidden, positions))

    def open_mask(self, batch: int, slots: int) -> Bool[Tensor, "batch 1 1 slots"] | None:
        """The mask for a decode step that sees every slot.

        None would say the same. But on a CPU transformers' grouped-query attention runs four
        times as fast with a mask as without, because only then it packs the queries of a group.
        """
        if self.attention == "sdpa" and self._grouped and self.device.type == "cpu":
            return torch.ones(batch, 1, 1, slots, dtype=torch.bool)
        return None

    def run_block(
        self,
        block: int,
        hidden: Float[Tensor, "batch tokens hidden"],
        mask: Bool[Tensor, "batch 1 tokens slots"] | None,
        positions: Int[Tensor, "batch tokens"],
        rotary: Rotary,
        kv: Any,
    ) -> Float[Tensor, "batch tokens hidden"]:
        """Run one block whole, attention and MLP, residuals included.

        Args:
            block: 0-based index.
            hidden: The residual that enters it.
            mask: True = may attend; None = plain causal over the new tokens.
            positions: Of the new tokens.
            rotary: Of the new tokens.
            kv: Takes the new keys and values and returns those to attend to, through
                `update(keys, values, layer_idx)`; None to keep nothing.
        """
        if self.attention == "eager":
            mask = self._additive(mask, hidden)
        out = self.blocks[block](
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rotary,
            past_key_values=kv,
            use_cache=kv is not None,
        )
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    def _additive(
        self, mask: Bool[Tensor, "batch 1 tokens slots"] | None, hidden: Tensor
    ) -> Float[Tensor, "batch 1 tokens slots"]:
        """Eager attention adds its mask, and knows no causality of its own."""
        if mask is None:
            tokens = hidden.shape[1]
            mask = torch.ones(tokens, tokens, dtype=torch.bool, device=hidden.device).tril()
            mask = mask[None, None]
        lowest = torch.finfo(hidden.dtype).min
        return torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, lowest)

    def project(
        self,
        block: int,
        hidden: Float[Tensor, "tokens hidden"],
        positions: Int[Tensor, " tokens"],
    ) -> tuple[Float[Tensor, "tokens heads head"], Float[Tensor, "tokens heads head"]]:
        """Keys and values that a block would have cached for the residuals that passed it by."""
        attention = self._attention(block)
        normed = getattr(self.blocks[block], self.family.attention_norm)(hidden)
        shape = (len(hidden), self.kv_width // self.head_dim, self.head_dim)
        keys = getattr(attention, self.family.key)(normed).view(shape)
        values = getattr(attention, self.family.value)(normed).view(shape)
        if self.family.key_norm is not None:
            keys = getattr(attention, self.family.key_norm)(keys)
        cos, sin = (part[0][:, None] for part in self.rotary(hidden, positions[None]))
        return keys * cos + _rotate_half(keys) * sin, values

    def key_projection(self, block: int) -> nn.Module:
        """The linear layer that makes a block's keys."""
        return cast(nn.Module, getattr(self._attention(block), self.family.key))

    def value_projection(self, block: int) -> nn.Module:
        """The linear layer that makes a block's values."""
        return cast(nn.Module, getattr(self._attention(block), self.family.value))

    def values(
        self, block: int, hidden: Float[Tensor, "tokens hidden"]
    ) -> Float[Tensor, "tokens width"]:
        """Values that a block would cache for these residuals, KV heads flattened."""
        normed = cast(Any, getattr(self.blocks[block], self.family.attention_norm))(hidden)
        return cast(Tensor, self.value_projection(block)(normed))

    def first_values_depend_on(self) -> list[Tensor]:
        """The weights that `values(0, embed(ids))` is made of."""
        norm = getattr(self.blocks[0], self.family.attention_norm)
        parts = (self.embedding, norm, self.value_projection(0))
        return [t for part in parts for t in (*part.parameters(), *part.buffers())]

    def _attention(self, block: int) -> Any:
        return getattr(self.blocks[block], self.family.attention)

    def logits(self, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape vocab"]:
        """Final norm and output projection."""
        return cast(Tensor, self.head(self.final_norm(hidden)))

    def logits_of(
        self, hidden: Float[Tensor, "*shape hidden"], tokens: Int[Tensor, " chosen"]
    ) -> Float[Tensor, "*shape chosen"]:
        """`logits` of these tokens alone: their rows of the output projection."""
        if type(self.head) is not nn.Linear:  # an adapter's weight is not all it computes
            return self.logits(hidden)[..., tokens]
        bias = None if self.head.bias is None else self.head.bias[tokens]
        return nn.functional.linear(self.final_norm(hidden), self.head.weight[tokens], bias)

    def shape(self) -> ModelShape:
        """The counts that costs are made of; weights may be on the meta device."""
        in_blocks = sum(p.numel() for p in self.blocks.parameters())
        outer = (self.embedding, self.final_norm, self.head)
        outside = {id(p): p.numel() for part in outer for p in part.parameters()}
        return ModelShape(
            num_blocks=self.num_blocks,
            block_params=in_blocks // self.num_blocks,
            outside_params=sum(outside.values()),
            head_params=cast(Any, self.head).weight.numel(),
            query_width=self.config.num_attention_heads * self.head_dim,
            kv_width=self.kv_width,
            bytes_per_param=float(self.dtype.itemsize),
            bytes_per_kv=float(self.dtype.itemsize),
        )
