"""A table of every prompt's summary and its answer's loss at every depth, measured once.

Backbone and router are frozen in stage 2, so nothing in it ever changes: with it ten thousand
steps take seconds, and a second recipe costs nothing more.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.data.examples import Example
from buddy.errors import TrainingError
from buddy.resume import ResumeFile, Words
from buddy.routing.budget_predictor import NUM_PINNED
from buddy.training.batches import rows_identity
from buddy.training.predictor.reward_model import RewardModel, model_identity

_WORDS: Final = Words(
    file="the table ",
    other="was measured for another run",
    otherwise="delete it, or name another --out",
    intact="what was measured before is intact: make room",
    error=TrainingError,
)


class LossTable:
    """Answers from the table.

    Args:
        examples: Its rows; each once.
        summaries: Of their prompts.
        by_depth: Cross-entropy at k = 1, 2 ...; NaN where pinned blocks leave no such depth.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        summaries: Float[Tensor, "rows summary"],
        by_depth: Float[Tensor, "rows middle"],
    ) -> None:
        self.examples = list(examples)
        self.by_depth = by_depth
        self._summaries = summaries
        self._row = {example: row for row, example in enumerate(self.examples)}

    def _rows(self, examples: Sequence[Example]) -> Int[Tensor, " batch"]:
        return torch.tensor([self._row[example] for example in examples])

    def summaries(self, examples: Sequence[Example]) -> Float[Tensor, "batch summary"]:
        """What the predictor reads of each prompt."""
        return self._summaries[self._rows(examples)]

    def losses(
        self, examples: Sequence[Example], blocks: Int[Tensor, "batch depths"]
    ) -> Float[Tensor, "batch depths"]:
        """Cross-entropy of each answer at each of its depths, in nats per token."""
        k = blocks.cpu() - NUM_PINNED
        return self.by_depth[self._rows(examples)].gather(1, k - 1)


def measure_table(
    prompts: RewardModel,
    examples: Sequence[Example],
    path: Path,
    *,
    lowest: int,
    batch_size: int,
    on_rows: Callable[[int, int], None] = lambda done, rows: None,
) -> LossTable:
    """Measure every prompt at every depth, or go on from what the file has.

    Args:
        prompts: Runs the model.
        examples: Repeated ones are measured once.
        path: Written every few seconds, whole or not at all.
        lowest: Fewest blocks that the policy can run.
        batch_size: Prompts at a time; those of like length go together.
        on_rows: Told how many rows are done, and how many there are.

    Raises:
        TrainingError: The file is damaged, of another model or of other rows, or cannot be
            written; or a loss is NaN.
    """
    rows = sorted(dict.fromkeys(examples), key=lambda example: example.num_tokens)
    identity = {
        "model": model_identity(prompts),
        "rows": rows_identity(rows),
        "batch_size": str(batch_size),
    }
    file = ResumeFile(path, identity, _WORDS)
    num_blocks = prompts.model.num_blocks
    summaries = torch.zeros(len(rows), prompts.router.config.summary_width)
    by_depth = torch.full((len(rows), num_blocks - NUM_PINNED), torch.nan)
    done, table = 0, {"summaries": summaries, "by_depth": by_depth}
    if (earlier := file.read(table)) is not None:
        done, table = file.check_done(earlier.values.get("done"), len(rows)), earlier.tensors
    summaries, by_depth = table["summaries"], table["by_depth"]
    depths = torch.arange(lowest, num_blocks + 1)
    on_rows(done, len(rows))
    while done < len(rows):
        some = rows[done : done + batch_size]
        here = slice(done, done + len(some))
        losses = prompts.losses(some, depths.expand(len(some), -1)).cpu()
        _check(losses, done)
        by_depth[here, lowest - NUM_PINNED - 1 :] = losses
        summaries[here] = prompts.summaries(some).cpu()
        done += len(some)
        on_rows(done, len(rows))
        if done == len(rows):
            file.write(table, done=done)
        else:
            file.write_if_due(lambda: table, done=done)
    return LossTable(rows, summaries, by_depth)


def _check(losses: Float[Tensor, "batch depths"], done: int) -> None:
    if not bool(losses.isfinite().all()):
        raise TrainingError(
            f"the loss of a prompt is NaN or infinite (of rows {done + 1} to {done + len(losses)}, "
            "by length): the model's weights are broken, or its dtype is too narrow; try "
            "model.dtype=float32"
        )
