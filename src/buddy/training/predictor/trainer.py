"""Stage 2, step by step: draw budgets, ask what they were worth, make the better ones likelier."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from buddy.data.examples import Example
from buddy.errors import TrainingError
from buddy.routing.budget_predictor import BudgetPredictor
from buddy.training.batches import BatchOrder
from buddy.training.losses import group_advantages
from buddy.training.predictor.grpo import grpo_loss, rewards, sample_budgets
from buddy.training.predictor.recipe import BudgetRecipe
from buddy.training.predictor.reward_model import Prompts


@dataclass(frozen=True, slots=True)
class PredictorStep:
    """What one step did; means over its prompts and the budgets drawn for them.

    Attributes:
        step: Steps done, this one included.
        loss: The policy loss, entropy in it.
        reward: See `grpo.rewards`.
        cross_entropy: Of the answers, in nats per token.
        entropy: Of the policy, in nats.
        blocks: Drawn.
        seconds: Wall-clock time.
    """

    step: int
    loss: float
    reward: float
    cross_entropy: float
    entropy: float
    blocks: float
    seconds: float


class PredictorTrainer:
    """Takes steps; each depends on the recipe, the predictor's weights and its number alone.

    Args:
        predictor: What is trained.
        prompts: Where losses come from.
        recipe: What to do.
        examples: Training rows.

    Raises:
        RecipeError: There are not enough rows for one batch.
    """

    def __init__(
        self,
        predictor: BudgetPredictor,
        prompts: Prompts,
        recipe: BudgetRecipe,
        examples: Sequence[Example],
    ) -> None:
        optim = recipe.optim
        self.predictor, self.recipe, self.steps = predictor, recipe, optim.steps
        self.order = BatchOrder(examples, optim.batch_size, optim.seed)
        self.parameters = dict(predictor.named_parameters())
        self.optimizer = torch.optim.AdamW(
            predictor.parameters(), lr=optim.learning_rate, weight_decay=optim.weight_decay
        )
        self.prompts = prompts

    def step(self, step: int) -> PredictorStep:
        """Take one step, counted from 0.

        Raises:
            TrainingError: The loss or a gradient is NaN or infinite; nothing was changed.
        """
        started_s = time.perf_counter()
        settings, examples = self.recipe.grpo, self.order[step]
        device = self.predictor.up.weight.device
        logits = self.predictor(self.prompts.summaries(examples).to(device))
        seed = self.recipe.optim.seed * 1_000_003 + step
        blocks = sample_budgets(logits, settings.samples, seed)
        losses = self.prompts.losses(examples, blocks).to(device)
        reward = rewards(losses, blocks, self.predictor.num_blocks, settings)
        out = grpo_loss(logits, blocks, group_advantages(reward, settings.epsilon), settings)
        out.loss.backward()  # type: ignore[no-untyped-call]
        loss, entropy = float(out.loss.detach()), float(out.entropy.detach())
        self._check(step, loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return PredictorStep(
            step=step + 1,
            loss=loss,
            reward=float(reward.mean()),
            cross_entropy=float(losses.mean()),
            entropy=entropy,
            blocks=float(blocks.cpu().double().mean()),
            seconds=time.perf_counter() - started_s,
        )

    def _check(self, step: int, loss: float) -> None:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if math.isfinite(loss) and all(bool(gradient.isfinite().all()) for gradient in gradients):
            return
        self.optimizer.zero_grad(set_to_none=True)
        raise TrainingError(
            f"the loss of step {step + 1} is NaN or infinite, so training has stopped; the last "
            "training state and checkpoint are intact: lower the learning rate or the reward's "
            "weights"
        )
