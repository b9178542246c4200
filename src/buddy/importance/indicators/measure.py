"""Measures an indicator over windows, and goes on where an interrupted measurement stopped."""

from collections.abc import Callable
from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.errors import ModelError
from buddy.importance.indicators.indicator import Gatherer, Indicator
from buddy.importance.work import BATCH, Work, resume_file
from buddy.processes import ALONE, Ranks
from buddy.resume import ResumeFile

OnBatch = Callable[[int, int], None]
"""Called as `on_batch(windows done, windows in all)`."""


def measure(
    indicator: Indicator,
    windows: Int[Tensor, "windows tokens"],
    *,
    on_batch: OnBatch = lambda done, total: None,
    **work: Unpack[Work],
) -> Float[Tensor, " blocks"]:
    """Feed all windows and return the scores.

    Args:
        indicator: Fresh.
        windows: Without pads.
        on_batch: Told of progress.
        **work: See `Work`.

    Raises:
        ModelError: A score is NaN or infinite.
        ResultError: The resume file is damaged, belongs to another measurement, or cannot be
            written.
    """
    file, ranks = resume_file(windows, {}, work), work.get("ranks", ALONE)
    batch = work.get("batch", BATCH)
    gather(indicator, windows, batch=batch, file=file, on_batch=on_batch, ranks=ranks)
    return finite(ranks.from_writer(indicator.scores))


def finite(scores: Float[Tensor, "*inputs blocks"]) -> Float[Tensor, "*inputs blocks"]:
    """The scores, by which blocks can be ranked: NaN would leave them in their own order.

    Raises:
        ModelError: A score is NaN or infinite.
    """
    wrong = (~scores.isfinite()).nonzero()
    if len(wrong):
        raise ModelError(
            f"the importance of block {int(wrong[0, -1])} is not a finite number: the model's "
            "numbers overflow, or its perplexity does; load it in bfloat16 or float32, or take "
            "another indicator, such as block-influence"
        )
    return scores


def gather(
    gatherer: Gatherer,
    windows: Int[Tensor, "windows tokens"],
    *,
    batch: int,
    file: ResumeFile,
    on_batch: OnBatch,
    keep: bool = False,
    ranks: Ranks = ALONE,
) -> None:
    """Feed all windows that the resume file does not have yet.

    Args:
        gatherer: Fresh.
        windows: Without pads.
        batch: Windows at a time.
        file: Left as it was last written.
        on_batch: Told of progress.
        keep: Write the file at the end too, so that it holds all.
        ranks: Processes that share the batches. The states of several are summed into the
            writer's, which then holds all; the others' is of no use.

    Raises:
        ResultError: See `measure`.
    """
    done, fresh = 0, gatherer.state()

    def state() -> dict[str, Tensor]:
        return {**gatherer.state(), "done": torch.tensor(done)}

    if (earlier := file.read(state())) is not None:
        gathered = earlier.tensors
        by_row = [gathered[name] for name, none in fresh.items() if 0 in none.shape[:1]]
        done = file.check_done(int(gathered.pop("done")), len(windows), by_row)
        gatherer.restore(gathered)
    done = ranks.from_writer(lambda: done)
    on_batch(done, len(windows))
    left = [windows[start : start + batch] for start in range(done, len(windows), batch)]
    for number, _ in enumerate(ranks.share(left, gatherer.update), start=1):
        done = min(done + batch, len(windows))
        on_batch(done, len(windows))
        # Within a round the states hold more than the batches that are counted.
        if number % ranks.size == 0 and ranks.from_writer(lambda: file.is_due):
            ranks.sum_to_writer(gatherer.state().values())
            file.write(state())
    ranks.sum_to_writer(gatherer.state().values())
    if keep:
        file.write(state())
