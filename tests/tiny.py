"""Tiny random models of every supported family, and inputs for them."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gemma import GemmaConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.granite import GraniteConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.olmo import OlmoConfig
from transformers.models.olmo2 import Olmo2Config
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.smollm3 import SmolLM3Config
from transformers.models.starcoder2 import Starcoder2Config

from buddy import BuddyForCausalLM
from buddy.backbone.families import FAMILIES
from buddy.routing.budget_predictor import BudgetPredictor, BudgetPredictorConfig
from buddy.routing.planner import PlannerConfig
from buddy.routing.router import Router, RouterConfig

VOCAB = 97
NUM_BLOCKS = 6

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

_PLAIN = {
    "llama": LlamaConfig(**_SIZES, attention_bias=True),
    "llama3": LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=True),
    "llama-mha": LlamaConfig(**{**_SIZES, "num_key_value_heads": 4}),
    "mistral": MistralConfig(**_SIZES, sliding_window=5, head_dim=16),
    "qwen2": Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=3),
    "qwen2.5": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SIZES, head_dim=16),
}
_PECULIAR = {
    "gemma": GemmaConfig(**_SIZES, head_dim=16),
    # Caps so low that they bend what a tiny model makes.
    "gemma2": Gemma2Config(
        **_SIZES,
        head_dim=16,
        sliding_window=5,
        query_pre_attn_scalar=8,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0,
    ),
    "gemma3_text": Gemma3TextConfig(
        **_SIZES,
        head_dim=16,
        sliding_window=5,
        sliding_window_pattern=3,
        query_pre_attn_scalar=8,
        final_logit_softcapping=3.0,
    ),
    "granite": GraniteConfig(
        **_SIZES,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
        logits_scaling=2.5,
        tie_word_embeddings=True,
    ),
    "mixtral": MixtralConfig(**_SIZES, num_local_experts=4, sliding_window=5, head_dim=16),
    "olmo": OlmoConfig(**_SIZES, clip_qkv=0.7),
    "olmo2": Olmo2Config(**_SIZES),
    "phi3": Phi3Config(**_SIZES, sliding_window=5),
    "phi3-partial": Phi3Config(**_SIZES, rope_parameters=_PARTIAL_ROPE),
    "qwen3_moe": Qwen3MoeConfig(
        **_SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=16
    ),
    "smollm3": SmolLM3Config(
        **_SIZES, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=5
    ),
    "starcoder2": Starcoder2Config(**_SIZES, sliding_window=5),
}
CONFIGS = _PLAIN | _PECULIAR
FAMILY_NAMES = tuple(_PLAIN)
"""Llama's layout: what most tests run on, and what the native decoder knows."""
PECULIAR_FAMILY_NAMES = tuple(_PECULIAR)
ALL_FAMILY_NAMES = tuple(CONFIGS)
"""What the parity suite runs on."""


def tiny_model(name="llama", *, seed=0, attention="sdpa"):
    """A float32 Hugging Face model whose weights, norms and biases are all random."""
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[name])
    allowed = FAMILIES[config.model_type].implementations
    config._attn_implementation = attention if attention in allowed else allowed[0]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Default initialisation is so small that skipping a block hardly shows.
            parameter.add_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3))
    return model


def random_router(model, *, seed=1, scale=3.0, prior=None, **planner):
    """A router whose scores really depend on the input."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    torch.manual_seed(seed)
    router = Router(
        RouterConfig(
            num_blocks=config.num_hidden_layers,
            token_width=config.num_key_value_heads * head_dim,
            planner=PlannerConfig(**planner),
        ),
        prior,
    )
    with torch.no_grad():
        for parameter in router.parameters():
            # Small biases: the context, not a constant, must decide.
            parameter.copy_(torch.randn_like(parameter) * (scale if parameter.ndim > 1 else 0.1))
    return router


def random_predictor(router, *, seed=2, scale=3.0, rank=8):
    """A predictor whose choice really depends on the input."""
    torch.manual_seed(seed)
    predictor = BudgetPredictor(router.config, BudgetPredictorConfig(rank=rank))
    with torch.no_grad():
        for parameter in predictor.parameters():
            parameter.copy_(torch.randn_like(parameter) * (scale if parameter.ndim > 1 else 0.1))
    return predictor


def tiny_buddy(
    name="llama",
    *,
    attention="sdpa",
    policy=None,
    kv_policy="lazy",
    predictor=False,
    engine="auto",
    **planner,
):
    """A tiny model with a random router, and a random predictor if asked."""
    model = tiny_model(name, attention=attention)
    router = random_router(model, **planner)
    return BuddyForCausalLM(
        model,
        router=router,
        predictor=random_predictor(router) if predictor else None,
        policy=policy,
        kv_policy=kv_policy,
        engine=engine,
    )


def random_ids(rows, tokens, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (rows, tokens), generator=generator)


def padded(rows, side):
    """Stack rows of unequal length; returns ids and attention mask."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, at], mask[i, at] = row, 1
    return ids, mask


def delete_blocks(model, blocks):
    """A copy of a Hugging Face model without these blocks."""
    model = copy.deepcopy(model)
    kept = [layer for i, layer in enumerate(model.model.layers) if i not in blocks]
    for i, layer in enumerate(kept):
        layer.self_attn.layer_idx = i
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        types = [t for i, t in enumerate(model.config.layer_types) if i not in blocks]
        model.config.layer_types = types
    return model


every_family = pytest.mark.parametrize("family", FAMILY_NAMES)
all_families = pytest.mark.parametrize("family", ALL_FAMILY_NAMES)
SOME_FAMILY_NAMES = ("llama", "gemma3_text", "qwen3_moe")
some_families = pytest.mark.parametrize("family", SOME_FAMILY_NAMES)
"""Plain, with windows and four norms, and with experts: where all would say the same again."""
KV_POLICIES = ("zero", "mask", "project", "lazy")
every_kv_policy = pytest.mark.parametrize("kv_policy", KV_POLICIES)


def with_kv_policies(families):
    """Each family under two KV policies, in turn; those that are least alike under all four."""
    pairs = [
        (family, policy)
        for place, family in enumerate(families)
        for turn, policy in enumerate(KV_POLICIES)
        if family in SOME_FAMILY_NAMES or (place + turn) % 2 == 0
    ]
    return pytest.mark.parametrize(("family", "kv_policy"), pairs)
