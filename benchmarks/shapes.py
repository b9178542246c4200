"""Models with random weights in the shape of known ones: speed needs no other."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPES = {
    "tiny": ("llama", 64, 160, 6, 4, 2, 512),
    "smollm2-135m": ("llama", 576, 1536, 30, 9, 3, 49152),
    "llama-2-7b": ("llama", 4096, 11008, 32, 32, 32, 32000),
    "llama-3-8b": ("llama", 4096, 14336, 32, 32, 8, 128256),
    "qwen2.5-7b": ("qwen2", 3584, 18944, 28, 28, 4, 152064),
}
"""Family, hidden, inner, blocks, heads, KV heads, vocabulary."""


def random_model(name, device):
    """A model of that shape with random weights."""
    family, hidden, inner, blocks, heads, kv_heads, vocab = SHAPES[name]
    config = AutoConfig.for_model(
        family,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=8192,
        tie_word_embeddings=name == "smollm2-135m",
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
