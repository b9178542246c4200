"""What the classifier learns from: each prompt's summary, and its answer under every set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.data.examples import Example
from buddy.depth.policy import Observation
from buddy.errors import TrainingError
from buddy.methods.pudding.policy import CONTEXT_LAYER, PuddingConfig, prompt_summary
from buddy.resume import ResumeFile, fingerprint
from buddy.training.batches import collate, rows_identity
from buddy.training.fast import fast_passes
from buddy.training.predictor.depth_losses import leaf_losses
from buddy.training.predictor.shared_prefix import run_plans


@dataclass(frozen=True, slots=True)
class Targets:
    """What was measured of some prompts, the shortest first.

    Attributes:
        summaries: What the classifier reads of each prompt.
        log_likelihoods: Mean log-likelihood of its answer, nats per token.
    """

    summaries: Float[Tensor, "rows width"]
    log_likelihoods: Float[Tensor, "rows depths sets"]

    def __len__(self) -> int:
        return len(self.summaries)


def set_masks(config: PuddingConfig) -> Bool[Tensor, "depths_and_sets blocks"]:
    """What each set runs at each depth, the sets of a depth side by side; True = run."""
    masks = torch.ones(len(config.depths), len(config.orders), config.num_blocks, dtype=torch.bool)
    for place, depth in enumerate(config.depths):
        for number, order in enumerate(config.orders):
            masks[place, number, list(order[: config.num_blocks - depth])] = False
    return masks.flatten(0, 1)


@torch.no_grad()
def measure(
    backbone: Backbone, config: PuddingConfig, examples: Sequence[Example]
) -> tuple[Float[Tensor, "rows width"], Float[Tensor, "rows depths sets"]]:
    """Summaries and log-likelihoods of a batch; summaries are made from prompts alone."""
    batch = collate(examples, backbone.device)
    masks = set_masks(config).to(backbone.device).expand(len(examples), -1, -1)
    summaries: list[Tensor] = []

    def plans(seen: Observation) -> Bool[Tensor, "batch plans blocks"]:
        summaries.append(prompt_summary(seen))
        return masks

    with fast_passes(backbone):
        out = run_plans(backbone, CONTEXT_LAYER, batch, plans)
    losses = leaf_losses(backbone, out, batch)
    shape = len(examples), len(config.depths), len(config.orders)
    return summaries[0], -losses.view(shape)


def measure_targets(
    backbone: Backbone,
    config: PuddingConfig,
    examples: Sequence[Example],
    path: Path,
    *,
    batch_size: int,
    identity: dict[str, Any],
    on_rows: Callable[[int, int], None] = lambda done, rows: None,
) -> Targets:
    """Measure every prompt, or go on from what the file has.

    Args:
        backbone: Runs the blocks.
        config: Sets and depths.
        examples: Prompts and right answers.
        path: Written every few seconds, whole or not at all.
        batch_size: Prompts at a time; those of like length go together.
        identity: What else the measurement depends on; a file of another one is refused.
        on_rows: Told how many rows are done, and how many there are.

    Raises:
        ResultError: The file is damaged, of another measurement, or cannot be written.
        TrainingError: A log-likelihood is not a number.
    """
    rows = sorted(examples, key=lambda example: example.num_tokens)
    identity = {
        **identity,
        "orders": config.orders,
        "depths": config.depths,
        "rows": rows_identity(rows),
        "batch_size": batch_size,
        "text": fingerprint(torch.tensor([[example.num_tokens for example in rows]])),
    }
    file = ResumeFile(path, identity)
    measured = {
        "summaries": torch.zeros(0, config.width),
        "log_likelihoods": torch.zeros(0, len(config.depths), len(config.orders)),
    }
    if (earlier := file.read(measured)) is not None:
        measured = earlier.tensors
        file.check_done(len(measured["summaries"]), len(rows), measured.values())
    on_rows(len(measured["summaries"]), len(rows))
    while (done := len(measured["summaries"])) < len(rows):
        some = rows[done : done + batch_size]
        for name, new in zip(measured, measure(backbone, config, some), strict=True):
            measured[name] = torch.cat([measured[name], new.cpu()])
        if not bool(measured["log_likelihoods"][done:].isfinite().all()):
            raise TrainingError(
                f"a log-likelihood is not a number (of rows {done + 1} to {done + len(some)}, by "
                "length): the model's weights are broken, or its dtype is too narrow; try "
                "model.dtype=float32"
            )
        on_rows(done + len(some), len(rows))
        file.write_if_due(lambda: measured)
    file.write(measured)
    return Targets(measured["summaries"], measured["log_likelihoods"])
