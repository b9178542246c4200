"""Backbone: a Hugging Face causal LM taken apart into the steps that a plan can skip."""

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from buddy.backbone.families import block_windows, find_family, longest_of_rope
from buddy.backbone.spread import find_spread, moved
from buddy.depth.cost import ModelShape
from buddy.errors import ModelError, PromptError

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, [batch, tokens, angles] each; rows may be chosen of both.

The angles are as many as are rotated of a head. A family whose kinds of blocks rotate differently
has one kind's angles after another's in that axis; `run_block` takes what is its block's.
"""


def _rotate_half(x: Float[Tensor, "*shape head"]) -> Float[Tensor, "*shape head"]:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _rotate(
    keys: Float[Tensor, "tokens heads head"],
    cos: Float[Tensor, "tokens 1 angles"],
    sin: Float[Tensor, "tokens 1 angles"],
) -> Float[Tensor, "tokens heads head"]:
    """Rotate as much of each head as there are angles."""
    turned, rest = keys.tensor_split([cos.shape[-1]], dim=-1)
    # Some families keep their angles in float32 whatever the keys are.
    turned = (turned * cos + _rotate_half(turned) * sin).to(keys.dtype)
    return turned if rest.shape[-1] == 0 else torch.cat([turned, rest], dim=-1)


def _some_outputs(
    linear: nn.Module,
    x: Float[Tensor, "*shape columns"],
    rows: slice | Int[Tensor, " chosen"],
) -> Float[Tensor, "*shape chosen"]:
    """What a linear layer makes of `x`, these outputs alone."""
    if type(linear) is not nn.Linear:  # an adapter's weight is not all it computes
        return cast(Tensor, linear(x))[..., rows]
    bias = None if linear.bias is None else linear.bias[rows]
    return nn.functional.linear(x, linear.weight[rows], bias)


def check_token_ids(ids: Iterable[int], vocab: int) -> None:
    """Refuse numbers that are no tokens of a model with so many.

    Raises:
        PromptError: There is one.
    """
    wrong = next((token for token in ids if not 0 <= token < vocab), None)
    if wrong is not None:
        raise PromptError(
            f"token id {wrong} is not one of the model's {vocab}: use the model's own tokenizer"
        )


class Backbone:
    """The parts of a causal LM, by their role; runs one block at a time.

    Args:
        model: A Hugging Face causal LM of a supported family, with `sdpa` or `eager` attention.

    Raises:
        FamilyError: The family is not in the table.
        ModelError: The attention implementation takes no explicit mask, or is none that
            computes this family; or what surrounds the blocks lies on several devices.

    Attributes:
        spread: Where each block lies; None where all lie where the tokens are.
        depth_scales: Those of adapters that know the depth, `depth_scales.DepthScales`; else None.
    """

    depth_scales: Any = None

    def __init__(self, model: nn.Module) -> None:
        config = cast(Any, model.config)
        family = find_family(config)
        core = attrgetter(family.backbone)(model)
        self.config, self.family = config, family
        self.blocks: nn.ModuleList = attrgetter(family.blocks)(core)
        self.num_blocks = len(self.blocks)
        self.windows = block_windows(config, family)
        self.embedding: nn.Embedding = attrgetter(family.embedding)(core)
        self._rotary: nn.Module = attrgetter(family.rotary)(core)
        self.final_norm: nn.Module = attrgetter(family.final_norm)(core)
        self.head: nn.Module = attrgetter(family.head)(model)
        self.locate()
        self._model = model
        self.attention: str = config._attn_implementation
        if self.attention not in ("sdpa", "eager"):
            raise ModelError(
                f"attention {self.attention!r} takes no mask of its own for each block: "
                'expected "sdpa" or "eager"; load the model with attn_implementation="sdpa"'
            )
        if self.attention not in family.implementations:
            raise ModelError(
                f"attention {self.attention!r} does not compute {family.title}: load the model "
                f'with attn_implementation="{family.implementations[0]}"'
            )
        head_dim = getattr(config, "head_dim", None)
        self.head_dim: int = head_dim or config.hidden_size // config.num_attention_heads
        self.kv_width: int = config.num_key_value_heads * self.head_dim
        self._grouped = config.num_attention_heads > config.num_key_value_heads
        longest = longest_of_rope(config)
        self.context: int = min(config.max_position_embeddings, longest or sys.maxsize)
        """Tokens that a sequence may have: not those for which the angles of all would be others,
        as keys in the cache would not have these."""
        self._block_kinds: list[str] | None = config.layer_types if family.rotary_by_kind else None
        self._kinds = sorted(set(self._block_kinds or ()))

    def locate(self) -> None:
        """Look where the blocks lie; asked again when weights have moved."""
        self.spread = find_spread(self.blocks, (self.embedding, self.final_norm, self.head))

    @property
    def vocab(self) -> int:
        """How many token ids have logits."""
        return int(cast(Any, self.head).out_features)

    def set_ends(self, embedding: nn.Module, head: nn.Module) -> None:
        """Put in another embedding of token ids and another output projection."""
        model, family = cast(Any, self._model), self.family
        self.embedding, self.head = cast(nn.Embedding, embedding), head
        setattr(attrgetter(family.backbone)(model), family.embedding, embedding)
        setattr(model, family.head, head)
        model._tied_weights_keys = {}  # or transformers would tie the new one

    @property
    def device(self) -> torch.device:
        """Where tokens go in and logits come out; all blocks are there too, if not spread."""
        return self.embedding.weight.device

    @property
    def devices(self) -> Sequence[torch.device]:
        """Where each block lies."""
        return self.spread or (self.device,) * self.num_blocks

    @property
    def dtype(self) -> torch.dtype:
        """The weights' number format."""
        return self.embedding.weight.dtype

    def embed(self, token_ids: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens hidden"]:
        """The residual that enters the first block.

        Raises:
            PromptError: An id is no token of the model.
        """
        try:
            embedded = cast(Tensor, self.embedding(token_ids))
        except IndexError as error:  # asking each time would take longer, and wait for a GPU
            raise PromptError(
                f"a token id is not one of the model's {self.embedding.num_embeddings}: use the "
                "model's own tokenizer"
            ) from error
        scale = self._setting(self.family.embedding_scale)
        return embedded if scale is None else embedded * scale

    def _setting(self, field: str | None) -> float | None:
        """What the config says under a name of the family table; None where it says nothing."""
        return None if field is None else getattr(self.config, field, None)

    def rotary(
        self, hidden: Float[Tensor, "*shape hidden"], positions: Int[Tensor, "batch tokens"]
    ) -> Rotary:
        """Cosines and sines of the positions, as the model's own rotary embedding makes them."""
        if not self._kinds:
            return cast(Rotary, self._rotary(hidden, positions))
        by_kind = [self._rotary(hidden, positions, kind) for kind in self._kinds]
        cos, sin = (torch.cat(parts, dim=-1) for parts in zip(*by_kind, strict=True))
        return cos, sin

    def _rotary_of(self, block: int, rotary: Rotary) -> Rotary:
        """The block's own angles."""
        if self._block_kinds is None:
            return rotary
        place = self._kinds.index(self._block_kinds[block])
        cos, sin = (part.chunk(len(self._kinds), dim=-1)[place] for part in rotary)
        return cos, sin

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
        mask: Bool[Tensor, "rows 1 queries slots"] | None,
        positions: Int[Tensor, "batch tokens"],
        rotary: Rotary,
        kv: Any,
    ) -> Float[Tensor, "batch tokens hidden"]:
        """Run one block whole, attention and MLP, residuals included, wherever it lies.

        Args:
            block: 0-based index.
            hidden: The residual that enters it.
            mask: True = may attend; None = plain causal over the new tokens. Its rows and queries
                are those of `hidden`, or those into which the attention function lays them.
            positions: Of the new tokens.
            rotary: Of the new tokens, as `rotary` made it.
            kv: Takes the new keys and values and returns those to attend to, through
                `update(keys, values, layer_idx)`; None to keep nothing.

        Raises:
            ModelError: transformers would run the block without `kv`.
        """
        module = cast(Any, self.blocks[block])
        if module.training and getattr(module, "gradient_checkpointing", False):
            raise ModelError(
                "transformers hides keys and values from what runs between checkpointed blocks: "
                "turn gradient checkpointing off, and use smaller batches or buddy train with "
                "optim.activation_checkpointing"
            )
        if self.attention == "eager":
            mask = self._additive(mask, hidden)
        home, (cos, sin) = hidden.device, self._rotary_of(block, rotary)
        if self.spread is not None:
            mask = None if mask is None else mask.to(self.spread[block])
            hidden, positions, cos, sin = moved(self.spread[block], hidden, positions, cos, sin)
        out = module(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=(cos, sin),
            cache=kv,
            use_cache=kv is not None,
        )
        return cast(Tensor, out[0] if isinstance(out, tuple) else out).to(home)

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
        home = hidden.device
        if self.spread is not None:
            hidden, positions = moved(self.spread[block], hidden, positions)
        attention, family = self._attention(block), self.family
        normed = self._attention_input(block, hidden)
        keys, values = self._keys(block, normed), self._values(block, normed)
        heads = (len(hidden), self.kv_width // self.head_dim, self.head_dim)
        if family.key_norm is not None and family.key_norm_spans_heads:
            keys = getattr(attention, family.key_norm)(keys).view(heads)
        elif family.key_norm is not None:
            keys = getattr(attention, family.key_norm)(keys.view(heads))
        keys, values = keys.view(heads), values.view(heads)
        if family.rotates is None or getattr(attention, family.rotates):
            kind = () if self._block_kinds is None else (self._block_kinds[block],)
            cos, sin = self._rotary(hidden, positions[None], *kind)
            keys = _rotate(keys, cos[0, :, None], sin[0, :, None])
        return keys.to(home), values.to(home)

    def _attention_input(
        self, block: int, hidden: Float[Tensor, "tokens hidden"]
    ) -> Float[Tensor, "tokens hidden"]:
        norm = self._attention_norm(block)
        return hidden if norm is None else cast(Tensor, norm(hidden))

    def _attention_norm(self, block: int) -> nn.Module | None:
        name = self.family.attention_norm
        return None if name is None else cast(nn.Module, getattr(self.blocks[block], name))

    def _keys(
        self, block: int, normed: Float[Tensor, "tokens hidden"]
    ) -> Float[Tensor, "tokens width"]:
        """The block's keys before norm and rotation, heads flattened."""
        return self._projected(self.key_projection(block), normed, -2 * self.kv_width)

    def _values(
        self, block: int, normed: Float[Tensor, "tokens hidden"]
    ) -> Float[Tensor, "tokens width"]:
        """The block's values, heads flattened."""
        return self._projected(self.value_projection(block), normed, -self.kv_width)

    def _projected(
        self, linear: nn.Module, normed: Float[Tensor, "tokens hidden"], start: int
    ) -> Float[Tensor, "tokens width"]:
        """What a projection makes; `kv_width` outputs from `start` on, where it is fused."""
        if self.family.fused is None:
            projected = cast(Tensor, linear(normed))
        else:
            projected = _some_outputs(linear, normed, slice(start, start + self.kv_width or None))
        size = self._setting(self.family.clip)
        return projected if size is None else projected.clamp(-size, size)

    def key_projection(self, block: int) -> nn.Module:
        """The linear layer that makes a block's keys, and perhaps queries and values with them."""
        name = self.family.fused or self.family.key
        return cast(nn.Module, getattr(self._attention(block), name))

    def value_projection(self, block: int) -> nn.Module:
        """The linear layer that makes a block's values, and perhaps queries and keys with them."""
        name = self.family.fused or self.family.value
        return cast(nn.Module, getattr(self._attention(block), name))

    def values(
        self, block: int, hidden: Float[Tensor, "tokens hidden"]
    ) -> Float[Tensor, "tokens width"]:
        """Values that a block would cache for these residuals, KV heads flattened."""
        return self._values(block, self._attention_input(block, hidden))

    def first_values_depend_on(self) -> list[Tensor]:
        """The weights that `values(0, embed(ids))` is made of."""
        norm = self._attention_norm(0)
        parts = (self.embedding, *(() if norm is None else (norm,)), self.value_projection(0))
        return [t for part in parts for t in (*part.parameters(), *part.buffers())]

    def _attention(self, block: int) -> Any:
        return getattr(self.blocks[block], self.family.attention)

    @contextmanager
    def watched_mlp(self, block: int) -> Iterator[list[Tensor]]:
        """List what the block's MLP adds to this thread's residual, within."""
        seen: list[Tensor] = []
        own = threading.get_ident()
        module = getattr(self.blocks[block], self.family.mlp_norm or "mlp")
        scale = self._setting(self.family.residual_scale)

        def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if threading.get_ident() == own:  # the module is every thread's
                seen.append(output if scale is None else output * scale)

        hook = module.register_forward_hook(note)
        try:
            yield seen
        finally:
            hook.remove()

    def logits(self, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape vocab"]:
        """Final norm and output projection, scaled and capped as the family does."""
        return self._capped(cast(Tensor, self.head(self.final_norm(hidden))))

    def logits_of(
        self, hidden: Float[Tensor, "*shape hidden"], tokens: Int[Tensor, " chosen"]
    ) -> Float[Tensor, "*shape chosen"]:
        """`logits` of these tokens alone: their rows of the output projection."""
        return self._capped(_some_outputs(self.head, self.final_norm(hidden), tokens))

    def _capped(self, logits: Float[Tensor, "*shape vocab"]) -> Float[Tensor, "*shape vocab"]:
        divisor = self._setting(self.family.logits_divisor)
        if divisor is not None:
            logits = logits / divisor
        cap = self._setting(self.family.logits_cap)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def own_logits(
        self, token_ids: Int[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens vocab"]:
        """What the model's own forward makes of them, with nothing of Buddy's in between."""
        return cast(Tensor, self._model(input_ids=token_ids, use_cache=False).logits)

    def shape(self) -> ModelShape:
        """The counts that costs are made of; weights may be on the meta device.

        All experts of a mixture count, as if every token ran each of them.
        """
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
