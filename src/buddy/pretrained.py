"""What transformers' tools ask of a model beside `forward` and `generate`.

Buddy takes a model's parts by their roles when it wraps it. What would put other parts in their
place afterwards is refused, as the blocks would go on with the old ones.
"""

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from buddy.backbone.backbone import Backbone
from buddy.backbone.nf4 import NF4Linear
from buddy.backbone.quantised import QuantisedLinear
from buddy.errors import ModelError

# By this table of class names `pipeline("text-generation")` knows whom it serves.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["buddy"] = "BuddyForCausalLM"


def _refused(name: str, why: str) -> Callable[..., NoReturn]:
    """A method that says why there is none."""

    def method(self: Any, *args: Any, **options: Any) -> NoReturn:
        raise ModelError(f"BuddyForCausalLM has no {name}: {why}")

    method.__name__, method.__doc__ = name, f"Refused: {why}."
    return method


_PARTS = (
    "the model's parts are taken when it is wrapped; change the transformers model first, then "
    "wrap it by BuddyForCausalLM(model)"
)
_CHECKPOINTING = (
    "transformers hides keys and values from what runs between checkpointed blocks; use smaller "
    "batches, or buddy train with optim.activation_checkpointing"
)
_BATCHING = (
    "transformers would keep a cache of its own; sequences join and leave a Buddy session at any "
    "step by run_step"
)


class Pretrained:
    """The part of a model that answers to the names of a `PreTrainedModel`."""

    model: nn.Module
    backbone: Backbone

    @classmethod
    def can_generate(cls) -> bool:
        """Whether `generate` can be called."""
        return True

    @property
    def name_or_path(self) -> str:
        """Where the wrapped model was loaded from."""
        return cast(str, cast(Any, self.model).name_or_path)

    @property
    def loss_type(self) -> str:
        """Name by which transformers' Trainer knows how many targets a row has."""
        return cast(str, cast(Any, self.model).loss_type)

    @property
    def hf_device_map(self) -> dict[str, torch.device]:
        """Where each block of a spread model lies, by name: tools that ask leave it there.

        Raises:
            AttributeError: The model is not spread.
        """
        backbone = self.backbone
        if backbone.spread is None:
            raise AttributeError("hf_device_map is of models on several devices; this has `device`")
        stack = f"{backbone.family.backbone}.{backbone.family.blocks}"
        return {f"{stack}.{block}": device for block, device in enumerate(backbone.spread)}

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of token ids."""
        return self.backbone.embedding

    def get_output_embeddings(self) -> nn.Module:
        """The output projection."""
        return self.backbone.head

    def tie_weights(self, *args: Any, **options: Any) -> None:
        """Change nothing: weights that are one are one since they were loaded."""

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Parameters of the wrapped model, the router and the predictor, each counted once.

        A quantised weight counts as what it stands for.

        Args:
            only_trainable: Count those that gradients flow to.
            exclude_embeddings: Leave the embedding of token ids out.
        """
        left_out = {id(self.backbone.embedding.weight)} if exclude_embeddings else set()
        plain = sum(
            each.numel()
            for each in cast(nn.Module, self).parameters()
            if id(each) not in left_out
            and each.is_floating_point()  # what is packed counts below
            and (each.requires_grad or not only_trainable)
        )
        if only_trainable:
            return plain
        table = getattr(self.backbone.embedding, "head", None) if exclude_embeddings else None
        return plain + sum(
            layer.in_features * layer.out_features
            for layer in cast(nn.Module, self).modules()
            if isinstance(layer, QuantisedLinear | NF4Linear) and layer is not table
        )

    resize_token_embeddings = _refused("resize_token_embeddings", _PARTS)
    set_input_embeddings = _refused("set_input_embeddings", _PARTS)
    set_output_embeddings = _refused("set_output_embeddings", _PARTS)
    set_attn_implementation = _refused(
        "set_attn_implementation", 'load the model with attention="sdpa" or attention="eager"'
    )
    activation_checkpointing_enable = _refused("activation_checkpointing_enable", _CHECKPOINTING)
    gradient_checkpointing_enable = _refused("gradient_checkpointing_enable", _CHECKPOINTING)
    generate_batch = _refused("generate_batch", _BATCHING)
    init_continuous_batching = _refused("init_continuous_batching", _BATCHING)
    continuous_batching_context_manager = _refused("continuous_batching_context_manager", _BATCHING)
    push_to_hub = _refused(
        "push_to_hub", "write a folder by save_pretrained, and upload it by huggingface_hub"
    )
