"""What GRPO asks of prompts: their summaries, and their answers' losses at some depths."""

import copy
import hashlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.fingerprint import base_fingerprint
from buddy.data.examples import Example
from buddy.errors import RecipeError
from buddy.model import BuddyForCausalLM
from buddy.routing.budget_predictor import BudgetPredictor
from buddy.training.batches import collate
from buddy.training.fast import fast_passes
from buddy.training.predictor.depth_losses import depth_losses
from buddy.training.summaries import Standard, router_summaries


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
        if model.router is None:
            raise RecipeError(
                "model.name: a Budget Predictor reads the router's summary, and this model has no "
                "router: name a checkpoint of buddy train"
            )
        self.model, self.router = model, model.router

    def summaries(self, examples: Sequence[Example]) -> Float[Tensor, "batch summary"]:
        """What the router sees of each prompt."""
        return router_summaries(self.model, self.router, examples)

    def losses(
        self, examples: Sequence[Example], blocks: Int[Tensor, "batch depths"]
    ) -> Float[Tensor, "batch depths"]:
        """One pass that all depths share."""
        batch = collate(examples, self.model.device)
        with fast_passes(self.model.backbone):
            return depth_losses(
                self.model.backbone, self.model.scoring_policy, batch, blocks.to(self.model.device)
            )


class StandardisedPrompts:
    """Prompts whose summaries come standardised.

    Args:
        prompts: Where they come from; losses are passed on.
        standard: What they are measured against.
    """

    def __init__(self, prompts: Prompts, standard: Standard) -> None:
        self.prompts, self.standard = prompts, standard

    def summaries(self, examples: Sequence[Example]) -> Float[Tensor, "batch summary"]:
        """Each over the deviation, less the mean."""
        return self.standard(self.prompts.summaries(examples))

    def losses(
        self, examples: Sequence[Example], blocks: Int[Tensor, "batch depths"]
    ) -> Float[Tensor, "batch depths"]:
        """Losses of the prompts beneath; they are not standardised."""
        return self.prompts.losses(examples, blocks)


def folded(predictor: BudgetPredictor, standard: Standard | None) -> BudgetPredictor:
    """A copy that reads summaries as they are; `predictor` goes on learning from standardised."""
    ready = copy.deepcopy(predictor)
    if standard is not None:
        standard.fold(ready.down)
    return ready


def model_identity(live: RewardModel) -> str:
    """SHA-256 of all that losses depend on: base weights, adapters, router, policy, dtype."""
    model, digest = live.model, hashlib.sha256()
    digest.update(base_fingerprint(model.model).encode())
    digest.update(f"{model.policy_spec} {model.dtype}".encode())
    named = [(name, p) for name, p in model.model.named_parameters() if "lora_" in name]
    named += list(live.router.state_dict().items())
    for name, tensor in named:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().double().numpy().tobytes())
    return digest.hexdigest()
