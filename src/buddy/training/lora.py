"""LoRA on all linear layers of the blocks, by PEFT; weights in float32."""

from typing import Any, cast

import torch
from torch import nn

from buddy.errors import ModelError
from buddy.models.quiet import quiet_peft
from buddy.training.recipe import LoraSettings


def add_lora(model: nn.Module, settings: LoraSettings, seed: int) -> nn.Module:
    """Freeze the model and wrap it by PEFT; without a rank, freeze alone.

    Raises:
        ModelError: The model has adapters already.
    """
    if hasattr(model, "peft_config"):
        raise ModelError(
            "the model has a LoRA adapter already: train from its base model, or load it with "
            "merge_adapter=True"
        )
    model.requires_grad_(False)
    if settings.rank == 0:
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=cast(Any, settings.alpha),
        lora_dropout=settings.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), quiet_peft():
        torch.manual_seed(seed)
        return cast(nn.Module, get_peft_model(cast(Any, model), config))
