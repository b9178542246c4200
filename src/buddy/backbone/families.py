"""The family table: where each architecture keeps its parts. The one place that knows."""

from dataclasses import dataclass
from typing import Any, Final

from buddy.errors import FamilyError, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Attribute names of a Hugging Face decoder-only architecture, and what it does besides.

    The defaults are the Llama layout. A family fits when a block adds to the residual what it
    makes of it, rotary embeddings rotate halves, and the block is called as `block(hidden,
    attention_mask=, position_ids=, position_embeddings=, cache=)`. What happens inside
    of a block (scaled residuals, norms after a layer, capped scores) needs no field: the block
    does it itself. Fields say what happens outside, and how keys and values are made.
    """

    title: str
    """Name shown to a user."""
    backbone: str = "model"
    """The stack of blocks, inside the causal LM."""
    blocks: str = "layers"
    """Inside the backbone, as the next three."""
    embedding: str = "embed_tokens"
    rotary: str = "rotary_emb"
    final_norm: str = "norm"
    head: str = "lm_head"
    """Inside the causal LM."""
    attention: str = "self_attn"
    """Inside a block, as the next one."""
    attention_norm: str | None = "input_layernorm"
    """Norm of the residual before attention; None = attention takes the residual as it is."""
    key: str = "k_proj"
    """Inside the attention, as the next two."""
    value: str = "v_proj"
    fused: str | None = None
    """One linear layer of queries, keys and values, in this order, in place of `key`, `value`."""
    mlp_norm: str | None = None
    """Norm of what the MLP makes, before it is added to the residual; inside a block."""
    residual_scale: str | None = None
    """Config field: what a block multiplies by what it adds to the residual."""
    clip: str | None = None
    """Config field: the size to which keys and values are clipped."""
    key_norm: str | None = None
    """Norm over each key head, before the rotary embedding."""
    key_norm_spans_heads: bool = False
    """The norm is over all key heads of a token at once."""
    rotates: str | None = None
    """Attribute of the attention: whether the block rotates at all; None = every block does."""
    rotary_by_kind: bool = False
    """The rotary embedding has angles for each kind of block in the config's `layer_types`."""
    embedding_scale: str | None = None
    """Config field: what the model (not its embedding module) multiplies embeddings by."""
    logits_divisor: str | None = None
    """Config field: what logits are divided by."""
    logits_cap: str | None = None
    """Config field: where a tanh caps the logits."""
    window: str | None = None
    """Config field with the sliding window: of every block, or, where the config has
    `layer_types`, of its sliding ones."""
    implementations: tuple[str, ...] = ("sdpa", "eager")
    """transformers' attention functions that compute this family truly, the default first."""
    mixture: bool = False
    """Each token chooses experts, so the work of a block depends on what it is given."""


FAMILIES: Final[dict[str, Family]] = {
    "gemma": Family(title="Gemma"),
    "gemma2": Family(
        title="Gemma 2",
        mlp_norm="post_feedforward_layernorm",
        window="sliding_window",
        logits_cap="final_logit_softcapping",
        implementations=("eager",),  # sdpa cannot cap scores
    ),
    "gemma3_text": Family(
        title="Gemma 3",
        mlp_norm="post_feedforward_layernorm",
        window="sliding_window",
        key_norm="k_norm",
        rotary_by_kind=True,
        logits_cap="final_logit_softcapping",
    ),
    "granite": Family(
        title="Granite",
        residual_scale="residual_multiplier",
        embedding_scale="embedding_multiplier",
        logits_divisor="logits_scaling",
    ),
    "llama": Family(title="Llama"),
    "mistral": Family(title="Mistral", window="sliding_window"),
    "mixtral": Family(title="Mixtral", window="sliding_window", mixture=True),
    "olmo": Family(title="OLMo", clip="clip_qkv"),
    "olmo2": Family(
        title="OLMo 2",
        attention_norm=None,
        key_norm="k_norm",
        key_norm_spans_heads=True,
        mlp_norm="post_feedforward_layernorm",
    ),
    "phi3": Family(title="Phi-3", fused="qkv_proj", window="sliding_window"),
    "qwen2": Family(title="Qwen2", window="sliding_window"),
    "qwen3": Family(title="Qwen3", key_norm="k_norm", window="sliding_window"),
    "qwen3_moe": Family(
        title="Qwen3 MoE", key_norm="k_norm", window="sliding_window", mixture=True
    ),
    "smollm3": Family(title="SmolLM3", rotates="use_rope", window="sliding_window"),
    "starcoder2": Family(title="StarCoder2", window="sliding_window"),
}
"""`config.model_type` -> where its parts are."""

PLAIN: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose blocks are RMS norms, rotary attention and a gated MLP, in the Llama layout."""


def find_family(config: Any) -> Family:
    """The row of the table that fits a Hugging Face config.

    Raises:
        FamilyError: There is none, and the message says how to add it; or the config asks for an
            encoder, or for attention to what follows, which no cache can serve.
    """
    model_type = getattr(config, "model_type", None)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise FamilyError(
            f"model type {model_type!r} is not supported: expected one of "
            f"{', '.join(sorted(FAMILIES))}; for another decoder-only family add a row to "
            "FAMILIES in buddy/backbone/families.py that names its parts, and its tiny config "
            "to tests/tiny.py"
        )
    if getattr(config, "is_encoder_decoder", None):
        raise FamilyError(
            f"{family.title} with is_encoder_decoder is not supported: it has no encoder; set the "
            "key to false"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise FamilyError(
            f"{family.title} with use_bidirectional_attention is not supported: a token's keys "
            "and values would change with what follows it; load a model that generates text"
        )
    return family


def block_windows(config: Any, family: Family) -> list[int | None]:
    """Each block's sliding window in tokens; None = sees everything before it.

    Raises:
        FamilyError: The window is no number of tokens.
    """
    num_blocks: int = config.num_hidden_layers
    window = getattr(config, family.window, None) if family.window else None
    if window is None:
        return [None] * num_blocks
    if type(window) is not int or window < 1:
        raise FamilyError(
            f"{family.window} must be a number of tokens of at least 1, or null for none, got "
            f"{shown(window)}: correct it in config.json"
        )
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * num_blocks
    return [window if kind == "sliding_attention" else None for kind in kinds]


def rope_of_length(config: Any) -> str | None:
    """The rotary embedding's kind, where its angles depend on how long the sequence is."""
    kinds = (rope.get("rope_type", "default") for rope in _ropes(config))
    return next((kind for kind in kinds if kind in ("dynamic", "longrope")), None)


def longest_of_rope(config: Any) -> int | None:
    """Tokens up to which `longrope` keeps its angles; None where they stay as they are.

    (`dynamic` keeps them over the whole context.)
    """
    lengths = (
        int(rope["original_max_position_embeddings"])
        for rope in _ropes(config)
        if rope.get("rope_type") == "longrope"
    )
    return min(lengths, default=None)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Parameters of every rotary embedding; some models have several, each for a kind of block."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_kind = [rope for rope in parameters.values() if isinstance(rope, dict)]
    return by_kind or [parameters]
