"""LayerSkip's training: blocks dropped at random, the loss taken at exits by the shared head."""

from typing import Final

import torch

from buddy.data.examples import Example
from buddy.depth.plan import DepthPlan
from buddy.methods.layerskip.layer_dropout import draw_runs, drop_rates, exit_weights
from buddy.methods.layerskip.recipe import LayerSkipRecipe
from buddy.training.batches import collate
from buddy.training.fast import fast_passes
from buddy.training.losses import answer_losses, mean_by_row
from buddy.training.packing import PackedRun
from buddy.training.router.run import TrainingMethod
from buddy.training.router.straight_through import begin_pass
from buddy.training.router.trainer import JointTrainer, RowReport


class LayerSkipTrainer(JointTrainer):
    """Takes the steps of LayerSkip; rows, their order and the optimiser are those of Buddy.

    The loss that it reports of a row is that of the last exit, and its plan the blocks that the
    row did not drop.
    """

    recipe: LayerSkipRecipe

    def _backward(self, examples: list[Example], seed: int, step: int) -> list[RowReport]:
        model, settings = self.model, self.recipe.exits
        num_blocks, backbone = model.num_blocks, model.backbone
        mine = range(self._process[0], len(examples), self._process[1])
        weights = self._weights(examples)
        batch = collate([examples[place] for place in mine], model.device)
        rates = drop_rates(settings.dropout, num_blocks)
        runs = [draw_runs(rates, seed, place) for place in mine]
        plan = DepthPlan.of_lanes(runs, model.device)
        by_example = torch.tensor([weights[place] for place in mine], device=model.device)
        exits = exit_weights(
            settings.curriculum, settings.period, settings.scale, num_blocks, step, self.steps
        )
        loss = by_row = by_example.new_zeros(len(mine))
        with fast_passes(backbone):
            run = begin_pass(PackedRun, backbone, batch)
            by_lane = plan.repeat(run.lanes.counts)
            for block in range(num_blocks):
                run.blocks(range(block, block + 1), by_lane)
                if block not in exits:
                    continue
                hidden = run.hidden.view(*batch.token_ids.shape, -1)[batch.rows, batch.columns]
                by_row = mean_by_row(
                    answer_losses(backbone, hidden, batch.targets), batch.rows, len(mine)
                )
                loss = loss + exits[block] * by_row * by_example
            loss.sum().backward()  # type: ignore[no-untyped-call]
        self._sum_gradients()
        depths = plan.host.sum(1).tolist()
        return self._gather(
            [
                (float(loss_of_row), depth, executed, float(weight))
                for loss_of_row, depth, executed, weight in zip(
                    by_row.detach(), depths, plan.executed_sets, by_example, strict=True
                )
            ]
        )


train_layerskip: Final = TrainingMethod(trainer=LayerSkipTrainer).train
"""Trains LoRA for early exits by a recipe."""
