"""The family table: where each architecture keeps its parts. The one place that knows."""

from dataclasses import dataclass
from typing import Any, Final

from buddy.errors import FamilyError


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Attribute names of a Hugging Face decoder-only architecture.

    The defaults are the Llama layout. A family fits when its blocks are pre-norm (the
    normalised residual enters the attention), rotary embeddings rotate halves, and the block
    is called as `block(hidden, attention_mask=, position_ids=, position_embeddings=,
    past_key_values=)`.
    """

    title: str
    """As shown to a user."""
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
    attention_norm: str = "input_layernorm"
    key: str = "k_proj"
    """Inside the attention, as the next two."""
    value: str = "v_proj"
    key_norm: str | None = None
    """Norm over each key head, before the rotary embedding."""
    window: str | None = None
    """Config field with the sliding window: of every block, or, where the config has
    `layer_types`, of its sliding ones."""


FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(title="Llama"),
    "mistral": Family(title="Mistral", window="sliding_window"),
    "qwen2": Family(title="Qwen2", window="sliding_window"),
    "qwen3": Family(title="Qwen3", key_norm="k_norm", window="sliding_window"),
}
"""`config.model_type` -> where its parts are."""


def find_family(config: Any) -> Family:
    """The row of the table that fits a Hugging Face config.

    Raises:
        FamilyError: There is none; the message says how to add it.
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
    return family


def block_windows(config: Any, family: Family) -> list[int | None]:
    """Each block's sliding window in tokens; None = sees everything before it."""
    num_blocks: int = config.num_hidden_layers
    window = getattr(config, family.window, None) if family.window else None
    if window is None:
        return [None] * num_blocks
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * num_blocks
    return [window if kind == "sliding_attention" else None for kind in kinds]


def rope_of_length(config: Any) -> str | None:
    """The rotary embedding's kind, where its angles depend on how long the sequence is."""
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return kind if kind in ("dynamic", "longrope") else None
