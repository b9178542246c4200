"""LayerSkip's training: blocks dropped at random, the loss taken at exits by the shared head."""

from typing import Final

from buddy.data.examples import Example
from buddy.depth.plan import DepthPlan
from buddy.methods.layerskip.layer_dropout import draw_runs, drop_rates, exit_weights
from buddy.methods.layerskip.recipe import LayerSkipRecipe
from buddy.training.losses import answer_losses, mean_by_row
from buddy.training.packing import PackedRun, begin_pass
from buddy.training.router.run import TrainingMethod
from buddy.training.router.trainer import JointTrainer, RowReport, Share, row_reports


class LayerSkipTrainer(JointTrainer):
    """Takes the steps of LayerSkip; rows, their order and the optimiser are those of Buddy.

    The loss that it reports of a row is that of the last exit, and its plan the blocks that the
    row did not drop.
    """

    recipe: LayerSkipRecipe

    def _backward_of(
        self, share: Share, examples: list[Example], seed: int, step: int
    ) -> list[RowReport]:
        model, settings = self.model, self.recipe.exits
        num_blocks, backbone = model.num_blocks, model.backbone
        batch, weights = share.batch, share.weights
        rates = drop_rates(settings.dropout, num_blocks)
        plan = DepthPlan.of_lanes([draw_runs(rates, seed, row) for row in share.rows], model.device)
        exits = exit_weights(
            settings.curriculum, settings.period, settings.scale, num_blocks, step, self.steps
        )
        loss = by_row = weights.new_zeros(len(share.rows))
        with self._passes():
            run = begin_pass(PackedRun, backbone, batch)
            by_lane = plan.repeat(run.lanes.counts)
            for block in range(num_blocks):
                run.blocks(range(block, block + 1), by_lane)
                if block not in exits:
                    continue
                hidden = run.hidden.view(*batch.token_ids.shape, -1)[batch.rows, batch.columns]
                by_row = mean_by_row(
                    answer_losses(backbone, hidden, batch.targets), batch.rows, len(share.rows)
                )
                loss = loss + exits[block] * by_row * weights
            loss.sum().backward()  # type: ignore[no-untyped-call]
        depths = plan.host.sum(1).tolist()
        return row_reports(by_row, depths, plan.executed_sets, weights)


train_layerskip: Final = TrainingMethod(trainer=LayerSkipTrainer).train
"""Trains LoRA for early exits by a recipe."""
