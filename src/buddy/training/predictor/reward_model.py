"""What GRPO asks of prompts: their summaries, and their answers' losses at some depths."""

import hashlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.fingerprint import base_fingerprint
from buddy.data.examples import Example
from buddy.errors import RecipeError
from buddy.generation.budgets import read_summary
from buddy.model import BuddyForCausalLM
from buddy.routing.router import Router
from buddy.training.batches import collate
from buddy.training.fast import fast_passes
from buddy.training.predictor.depth_losses import depth_losses


@runtime_checkable
class Prompts(Protocol):
    """Where rewards come from: a model that is run, or a table of what it gave."""

    def summaries(self, examples: Sequence[Example]) -> Float[Tensor, "batch summary"]:
        """What the predictor reads of each prompt."""
        ...

    def losses(
        self, examples: Sequence[Example], blocks: Int[Tensor, "batch depths"]
    ) -> Float[Tensor, "batch depths"]:
        """Cross-entropy of each answer at each of its depths, in nats per token."""
        ...


class RewardModel:
    """Runs the model anew for every question.

    Args:
        model: With a router; nothing of it is trained.

    Raises:
        RecipeError: It has no router.
    """

    def __init__(self, model: BuddyForCausalLM) -> None:
        self.model = model
        self.router = need_router(model)

    def summaries(self, examples: Sequence[Example]) -> Float[Tensor, "batch summary"]:
        """What the router sees of each prompt."""
        batch = collate(examples, self.model.device)
        everything = torch.ones_like(batch.is_prompt)
        return read_summary(
            self.model.backbone, self.router, batch.token_ids, everything, batch.is_prompt
        )

    def losses(
        self, examples: Sequence[Example], blocks: Int[Tensor, "batch depths"]
    ) -> Float[Tensor, "batch depths"]:
        """One pass that all depths share."""
        batch = collate(examples, self.model.device)
        with fast_passes(self.model.backbone):
            return depth_losses(
                self.model.backbone, self.model.scoring_policy, batch, blocks.to(self.model.device)
            )


def need_router(model: BuddyForCausalLM) -> Router:
    """The model's router.

    Raises:
        RecipeError: It has none.
    """
    if model.router is None:
        raise RecipeError(
            "model.name: a Budget Predictor reads the router's summary, and this model has no "
            "router: name a checkpoint of buddy train"
        )
    return model.router


def model_identity(model: BuddyForCausalLM) -> str:
    """SHA-256 of all that losses depend on: base weights, adapters, router, policy, dtype."""
    digest = hashlib.sha256()
    digest.update(base_fingerprint(model.model).encode())
    digest.update(f"{model.policy_spec} {model.dtype}".encode())
    named = [(name, p) for name, p in model.model.named_parameters() if "lora_" in name]
    named += list(need_router(model).state_dict().items())
    for name, tensor in named:
        digest.update(name.encode())
        digest.update(tensor.detach().double().cpu().numpy().tobytes())
    return digest.hexdigest()
