"""Rotary scaling stated in a GGUF file, in the words of a Hugging Face config.

transformers reads only the base frequency, so a file that stretches its frequencies (every
Llama 3.1 and later) would be converted to a model that is silently wrong.
"""

import math
from typing import Any, Final

from buddy.errors import CheckpointError
from buddy.hub.gguf.header import GgufHeader

_LLAMA3_CONTEXT: Final = 8192
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0
_SCALINGS: Final = ("linear", "yarn")
_SCALING_KEYS: Final = frozenset({"type", "factor", "original_context_length", "finetuned"})
_FIXED: Final = {
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_log_multiplier": 0.0,
}
"""Other keys, and the one value of each that transformers computes for these architectures.

Source: llama.cpp, src/llama-hparams.h and src/llama-context.cpp, where nothing is stated.
"""


def rope_scaling(header: GgufHeader) -> dict[str, Any]:
    """Entries to add to a config's `rope_parameters`; empty when nothing is scaled.

    Raises:
        CheckpointError: The file scales its frequencies in a way that has no equivalent here, or
            rotates a part of each head.
    """
    _require_whole_heads(header)
    prefix = f"{header.architecture}.rope.scaling."
    stated = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    # A file without a type means linear, and an older one has another name for its factor.
    kind = stated.get("type", "linear")
    factor = stated.get("factor", header.of_model("rope.scale_linear", 1.0))
    if factor <= 0:
        raise _refusal(header, f"{kind!r} with the factor {factor}")
    computed = _FIXED | {"yarn_ext_factor": 1.0 if kind == "yarn" else 0.0}
    for key, value in stated.items():
        if key not in _SCALING_KEYS and value != computed.get(key):
            raise _refusal(header, f"{kind!r} with {key[:80]} {str(value)[:80]}")
    if kind != "none" and kind not in _SCALINGS:
        raise _refusal(header, f"{kind!r} with {', '.join(sorted(stated))}")
    is_scaled = kind != "none" and factor != 1
    if header.rope_factors is not None and set(header.rope_factors) != {1.0}:
        if is_scaled:
            raise _refusal(header, f"both a table and {kind!r}")
        return _llama3(header, header.rope_factors)
    if not is_scaled:
        return {}
    scaling = {"rope_type": kind, "factor": factor}
    context = stated.get("original_context_length")
    if kind == "yarn" and context is not None:
        scaling["original_max_position_embeddings"] = context
    return scaling


def _require_whole_heads(header: GgufHeader) -> None:
    """Refuse heads that are rotated in part: transformers would rotate all of them."""
    width = header.of_model("embedding_length") // header.of_model("attention.head_count")
    head_dim = header.of_model("attention.key_length", width)
    rotated = header.of_model("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise CheckpointError(
            f"{header.path} rotates {rotated} of the {head_dim} numbers of a head; expected all of "
            "them; use the model's safetensors folder instead"
        )


def _llama3(header: GgufHeader, factors: tuple[float, ...]) -> dict[str, Any]:
    """Name the scaling behind a table of factors, and prove that it gives that table."""
    factor = max(factors)
    expected = _llama3_factors(header, factor, len(factors))
    pairs = zip(factors, expected, strict=True)
    # 1e-3: the table is kept in 32 bits, worked out by another program.
    if not all(math.isclose(got, wanted, rel_tol=1e-3) for got, wanted in pairs):
        raise _refusal(header, "a table that is not that of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_factors(header: GgufHeader, factor: float, num_pairs: int) -> list[float]:
    """Short waves keep their length, long ones grow by `factor`, the rest by something between.

    Source: Llama 3.1 reference code, `apply_scaling`.
    """
    theta = header.of_model("rope.freq_base", 10_000.0)
    factors = []
    for pair in range(num_pairs):
        wavelength = 2 * math.pi * theta ** (pair / num_pairs)
        smooth = (_LLAMA3_CONTEXT / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _refusal(header: GgufHeader, got: str) -> CheckpointError:
    return CheckpointError(
        f"{header.path} scales its rotary frequencies by {got}; expected no scaling, "
        f"{' or '.join(_SCALINGS)} by a factor, or the table of Llama 3; "
        "use the model's safetensors folder instead"
    )
