"""A causal LM of which only the weights are there: what a compiled kernel needs of one.

The code of transformers' models takes longer to import than a short answer takes to be written.
So a skeleton has the modules that hold weights, named as transformers names them, and makes a
block whole, by transformers' own code around these same modules, when the block is first run.
"""

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from buddy.backbone.families import PLAIN

Wholes = Callable[[], Sequence[nn.Module]]
"""Makes all blocks by transformers' code, without memory for their weights."""


def why_no_skeleton(config: Any) -> str | None:
    """Why a model has none; None where it has one."""
    if config.model_type not in PLAIN:
        return f"model type {config.model_type!r} is none of {', '.join(PLAIN)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act!r}, expected silu"
    rope = config.rope_parameters
    if rope.keys() != {"rope_type", "rope_theta"} or rope["rope_type"] != "default":
        return f"its rotary embedding is {rope!r}, expected the default one"
    return None


class Skeleton(nn.Module):
    """A causal LM's modules that have weights, on the meta device until weights are loaded.

    Args:
        config: Of a model that `why_no_skeleton` has nothing against.
        generation_config: Of transformers.
        stored: Names of the weights; by them it knows which layers have a bias.
        dtype: Of the weights.
        wholes: Asked once, when a block is first run.
    """

    def __init__(
        self,
        config: Any,
        generation_config: Any,
        stored: Mapping[str, Any],
        dtype: torch.dtype,
        wholes: Wholes,
    ) -> None:
        super().__init__()
        self.config, self.generation_config = config, generation_config
        make = _Maker(config, stored, dtype)
        whole = _WholeBlocks(wholes)
        blocks = [_Block(make, block, whole) for block in range(config.num_hidden_layers)]
        whole.own = blocks
        self.model = nn.Module()
        self.model.embed_tokens = make.embedding()
        self.model.layers = nn.ModuleList(blocks)
        self.model.norm = make.norm(config.hidden_size)
        self.model.rotary_emb = _Rotary(make.head_dim, config.rope_parameters["rope_theta"])
        self.lm_head = make.linear("lm_head", config.hidden_size, config.vocab_size)
        self._tie()
        self.eval()

    def fits(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """Whether weights of these names and shapes are all of its weights, and no others."""
        wanted = {name: tuple(weight.shape) for name, weight in self.named_parameters()}
        return wanted == {name: tuple(shape) for name, shape in shapes.items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take in weights that fit, where they lie."""
        self.load_state_dict(weights, strict=False, assign=True)
        self._tie()

    def _tie(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = cast(nn.Embedding, self.model.embed_tokens).weight

    @property
    def name_or_path(self) -> str:
        """Where the weights were loaded from."""
        return str(self.config.name_or_path)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of token ids."""
        return cast(nn.Module, self.model.embed_tokens)

    def get_output_embeddings(self) -> nn.Module:
        """The output projection."""
        return self.lm_head


class _Maker:
    """Makes layers on the meta device, by what a config says of sizes and a file of biases."""

    def __init__(self, config: Any, stored: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.config, self._stored = config, stored
        self._where: dict[str, Any] = {"dtype": dtype, "device": "meta"}
        heads = config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads

    def linear(self, name: str, columns: int, rows: int) -> nn.Linear:
        has_bias = f"{name}.bias" in self._stored
        return nn.Linear(columns, rows, bias=has_bias, **self._where)

    def embedding(self) -> nn.Embedding:
        # Given weights are not drawn: torch would import its compiler to draw none.
        config = self.config
        sizes = (config.vocab_size, config.hidden_size)
        weight = torch.empty(sizes, **self._where)
        return nn.Embedding(*sizes, padding_idx=config.pad_token_id, _weight=weight)

    def norm(self, size: int) -> "_RMSNorm":
        return _RMSNorm(torch.empty(size, **self._where), self.config.rms_norm_eps)


class _RMSNorm(nn.Module):
    """The norm of the plain families, in their order of roundings."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._epsilon = epsilon

    def forward(self, hidden: Float[Tensor, "*shape size"]) -> Float[Tensor, "*shape size"]:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._epsilon)
        return self.weight * wide.to(hidden.dtype)


class _Rotary(nn.Module):
    """The rotary embedding of the plain families, computed as they do."""

    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        every_other = torch.arange(0, head_dim, 2, dtype=torch.float, device="cpu")
        self.register_buffer("inv_freq", 1.0 / base ** (every_other / head_dim), persistent=False)

    def forward(
        self, hidden: Float[Tensor, "*shape hidden"], positions: Int[Tensor, "batch tokens"]
    ) -> tuple[Float[Tensor, "batch tokens head"], Float[Tensor, "batch tokens head"]]:
        angles = positions[..., None].float() * cast(Tensor, self.inv_freq).to(hidden.device)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


class _Block(nn.Module):
    """A block's weights; run, it is transformers' block of these weights."""

    def __init__(self, make: _Maker, index: int, whole: "_WholeBlocks") -> None:
        super().__init__()
        config, at = make.config, f"model.layers.{index}"
        hidden, head_dim = config.hidden_size, make.head_dim
        queries, keys = config.num_attention_heads, config.num_key_value_heads
        attention = nn.Module()
        for name, heads in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            linear = make.linear(f"{at}.self_attn.{name}", hidden, heads * head_dim)
            setattr(attention, name, linear)
        attention.o_proj = make.linear(f"{at}.self_attn.o_proj", queries * head_dim, hidden)
        if config.model_type == "qwen3":
            attention.q_norm, attention.k_norm = make.norm(head_dim), make.norm(head_dim)
        attention.scaling = head_dim**-0.5
        self.self_attn = attention
        self.mlp = _MLP(make, f"{at}.mlp")
        self.input_layernorm = make.norm(hidden)
        self.post_attention_layernorm = make.norm(hidden)
        self._index, self._whole = index, whole

    def forward(self, hidden: Tensor, **inputs: Any) -> Any:
        return self._whole.blocks()[self._index](hidden, **inputs)


class _MLP(nn.Module):
    """The gated MLP of the plain families."""

    def __init__(self, make: _Maker, at: str) -> None:
        super().__init__()
        hidden, inner = make.config.hidden_size, make.config.intermediate_size
        self.gate_proj = make.linear(f"{at}.gate_proj", hidden, inner)
        self.up_proj = make.linear(f"{at}.up_proj", hidden, inner)
        self.down_proj = make.linear(f"{at}.down_proj", inner, hidden)

    def forward(self, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape hidden"]:
        gated = nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        return cast(Tensor, self.down_proj(gated))


class _WholeBlocks:
    """Transformers' blocks around the modules of a skeleton's, made when one is first run."""

    def __init__(self, make: Wholes) -> None:
        self.own: Sequence[_Block] = ()
        self._make, self._lock = make, Lock()
        self._blocks: Sequence[nn.Module] | None = None

    def blocks(self) -> Sequence[nn.Module]:
        if self._blocks is None:
            with self._lock:
                if self._blocks is None:
                    self._blocks = [
                        _around(own, whole)
                        for own, whole in zip(self.own, self._make(), strict=True)
                    ]
        return self._blocks


def _around(own: _Block, whole: Any) -> nn.Module:
    """A block of transformers, with the modules of a skeleton's in the places of its own."""
    for name, module in own.self_attn.named_children():
        setattr(whole.self_attn, name, module)
    for name, module in own.named_children():
        if module is not own.self_attn:
            setattr(whole, name, module)
    return cast(nn.Module, whole.eval())
