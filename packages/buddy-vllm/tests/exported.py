"""Tiny exports with random weights and tables, written as `buddy export` writes them."""

import hashlib
import json

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_weights

VOCAB, NUM_BLOCKS, RANK = 512, 6, 4
ORDER = (3, 1, 4, 2)
"""Blocks that may go under the static policy, least important first."""
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
FAMILIES = {"llama": "BuddyLlamaForCausalLM", "qwen2": "BuddyQwen2ForCausalLM"}


def write_export(folder, *, family="llama", policy="static", predictor=False, weights=True, seed=0):
    """An export of a tiny random model in which every block matters."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": family, "architectures": [FAMILIES[family]], **_SIZES}
    (folder / "config.json").write_text(json.dumps({**config, "buddy": {}}))
    (folder / "generation_config.json").write_text("{}")
    if weights:
        save_weights(_weights(family, seed), folder / "model.safetensors", {"format": "pt"})
    tensors = _tables(seed, predictor=predictor, routed=policy == "routed")
    routing = folder / "buddy" / "routing.safetensors"
    routing.parent.mkdir(exist_ok=True)
    save_file(tensors, routing)
    content = routing.read_bytes()
    listed = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    said = {
        "format": 1,
        "model": {"num_blocks": NUM_BLOCKS},
        "policy": policy,
        "pinned": [0, NUM_BLOCKS - 1],
        "order": list(ORDER) if policy == "static" else None,
        "router": {"decay": 1.0} if policy == "routed" else None,
        "predictor": {"decay": 1.0, "least_blocks": 3} if predictor else None,
        "files": {"buddy/routing.safetensors": listed},
        "revision": f"{family}-{policy}-{seed}",
    }
    (folder / "buddy-export.json").write_text(json.dumps(said))
    return folder


def _tables(seed, *, predictor, routed):
    draw = np.random.default_rng(seed)
    made = {"prior": np.zeros(NUM_BLOCKS - 2, np.float32)}
    for part in [*(["router"] if routed else []), *(["predictor"] if predictor else [])]:
        made[f"{part}.table"] = draw.normal(size=(VOCAB, RANK)) * 3
        made[f"{part}.bias"] = draw.normal(size=RANK) * 0.1
        made[f"{part}.up"] = draw.normal(size=(NUM_BLOCKS - 2, RANK)) * 3
        made[f"{part}.offset"] = draw.normal(size=NUM_BLOCKS - 2) * 0.1
    return {name: tensor.astype(np.float32) for name, tensor in made.items()}


def _weights(family, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, kv = _SIZES["hidden_size"], _SIZES["intermediate_size"], 128

    def matrix(rows, columns, scale=1.0):
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    def vector(size, offset=0.0):
        return offset + torch.randn(size, generator=generator) * 0.3

    made = {
        "model.embed_tokens.weight": torch.randn(VOCAB, hidden, generator=generator),
        "model.norm.weight": vector(hidden, 1.0),
        "lm_head.weight": matrix(VOCAB, hidden, 2.0),
    }
    for block in range(NUM_BLOCKS):
        name = f"model.layers.{block}"
        for part in ("input_layernorm", "post_attention_layernorm"):
            made[f"{name}.{part}.weight"] = vector(hidden, 1.0)
        for part, rows, columns in (
            *(("self_attn.q_proj", hidden, hidden), ("self_attn.k_proj", kv, hidden)),
            *(("self_attn.v_proj", kv, hidden), ("self_attn.o_proj", hidden, hidden)),
            *(("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden)),
            ("mlp.down_proj", hidden, inner),
        ):
            made[f"{name}.{part}.weight"] = matrix(rows, columns, 1.5)
            if family == "qwen2" and part[-6:] in ("q_proj", "k_proj", "v_proj"):
                made[f"{name}.{part}.bias"] = vector(rows)
    return made


def write_tokenizer(folder):
    """Words w0 ... w511, each one token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w2"))
    made.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0").save_pretrained(folder)
