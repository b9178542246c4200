"""Training of a gated method: the model it makes, its step, and its evaluation."""

import random
from collections.abc import Sequence
from typing import Final

import torch

from buddy.checkpoint.resolve import ModelName
from buddy.data.examples import Example
from buddy.drawn import drawn_by
from buddy.methods.gated.gates import GatedPart, Pass
from buddy.methods.gated.passing import GatedRun, kept_by_row, last_hidden
from buddy.methods.gated.recipe import GatedRecipe, GateSettings, gates_of
from buddy.model import BuddyForCausalLM
from buddy.training.batches import collate, padded_width
from buddy.training.log import RouteCounts
from buddy.training.losses import answer_losses, mean_by_row
from buddy.training.packing import begin_pass
from buddy.training.router.evaluate import Evaluation
from buddy.training.router.model import build_model
from buddy.training.router.run import TrainingMethod
from buddy.training.router.trainer import JointTrainer, RowReport, Share, row_reports

_BATCH: Final = 16


def make_part(method: str, settings: GateSettings, model: BuddyForCausalLM, seed: int) -> GatedPart:
    """Fresh gates of a method for a model, drawn by a seed."""
    kind, config = gates_of(method), model.config
    sizes = {"num_blocks": model.num_blocks, "hidden_size": config.hidden_size}
    with drawn_by(seed):
        part = kind(kind.settings(**sizes, **kind.sizes(settings, config)))
    return part.to(model.device)


def build_gated(
    recipe: GatedRecipe, name: ModelName, device: str | torch.device | None
) -> BuddyForCausalLM:
    """The base model with fresh adapters and fresh gates.

    Raises:
        BuddyError: As `build_model`.
    """
    model = build_model(recipe, name, device)
    part = make_part(recipe.method, recipe.gates, model, recipe.optim.seed)
    model.kv_policy = part.leaves
    model.put_part(part)
    return model


class GatedTrainer(JointTrainer):
    """Takes the steps of a gated method; the data, their order and the optimiser are Buddy's."""

    recipe: GatedRecipe

    def adapts(self, step: int) -> bool:
        """Whether a step trains adapters under frozen gates."""
        return False

    def router_rate(self) -> float:
        """Peak learning rate of the gates."""
        return self.recipe.gates.learning_rate

    def _backward_of(
        self, share: Share, examples: list[Example], seed: int, step: int
    ) -> list[RowReport]:
        model, gates = self.model, self.recipe.gates
        part = model.learned
        assert isinstance(part, GatedPart)
        batch, real = share.batch, ~share.batch.is_pad
        noise = torch.Generator().manual_seed(random.Random(f"{seed}-0").getrandbits(63))
        seen = Pass(
            torch.arange(batch.token_ids.shape[1], device=model.device),
            batch.is_prompt,
            real,
            noise,
            adapts=self.adapts(step),
            whole=(len(examples), padded_width(examples)),
            process=self._process,
            reduce=self._reduce,
        )
        with self._passes():
            run = begin_pass(GatedRun, model.backbone, batch, part=part, seen=seen)
            hidden = last_hidden(run, model.num_blocks)
            losses = answer_losses(model.backbone, hidden[batch.rows, batch.columns], batch.targets)
            by_row = mean_by_row(losses, batch.rows, len(share.rows))
            loss = (by_row * share.weights).sum()
            if gates.penalty > 0 and not seen.adapts:
                loss = loss + gates.penalty * part.cost(run.gates, by_row, seen, gates.target)
            loss.backward()  # type: ignore[no-untyped-call]
        block_masks = kept_by_row(run.gates, model.num_blocks, part.governed)
        depths = ((block_masks.sum(2) * real).sum(1) / batch.lengths).tolist()
        prompts = batch.is_prompt.sum(1).tolist()
        plans = [
            tuple(block_masks[row, first].nonzero()[:, 0].tolist())
            for row, first in enumerate(prompts)
        ]
        weights = self._weights(examples)
        return row_reports(by_row, map(round, depths), plans, [weights[row] for row in share.rows])


@torch.no_grad()
def evaluate_online(
    model: BuddyForCausalLM, examples: Sequence[Example], budgets: Sequence[int]
) -> tuple[list[Evaluation], RouteCounts]:
    """Answer cross-entropy at the depth that the gates choose; routes see the prompt alone.

    Args:
        model: Put back into the mode it was in.
        examples: Validation rows.
        budgets: Not used: the method keeps none.

    Returns:
        One evaluation, whose `blocks` is the mean over tokens, rounded, and all plans.
    """
    was_training = model.training
    model.eval()
    total, tokens, ran, fed, counts = 0.0, 0, 0, 0, RouteCounts()
    ordered = sorted(examples, key=lambda example: example.num_tokens)
    for start in range(0, len(ordered), _BATCH):
        chosen = ordered[start : start + _BATCH]
        batch = collate(chosen, model.device)
        real = ~batch.is_pad
        out = model(batch.token_ids, real.long(), prompt_mask=batch.is_prompt, logits_to_keep=1)
        hidden = out.lanes.hidden.new_zeros(*real.shape, out.lanes.hidden.shape[1])
        hidden[real] = out.lanes.hidden
        losses = answer_losses(model.backbone, hidden[batch.rows, batch.columns], batch.targets)
        total += float(losses.cpu().double().sum())
        tokens += len(batch.targets)
        ran += int(out.lanes.executed.sum())
        fed += out.lanes.lanes.num
        counts.add(out.lanes.last_plan.executed_sets)
    model.train(was_training)
    entropy = counts.mask_entropy(model.num_blocks)
    evaluation = Evaluation(round(ran / fed), total / tokens, counts.num_distinct, entropy)
    return [evaluation], counts


GATED: Final = TrainingMethod(build=build_gated, trainer=GatedTrainer, evaluate=evaluate_online)
train_gated: Final = GATED.train
"""Trains a gated method by a recipe."""
