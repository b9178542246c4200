"""How plans reach the model on vLLM's V1 runner, which CPUs use."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from buddy_vllm import adapter
from buddy_vllm.batch import Batch, row_of


def install() -> None:
    """Have the runner hand each pass its plans."""
    adapter.wrap_v1_runner(batch_of, note)


def batch_of(runner: Any) -> Batch | None:
    """The requests of the coming pass, and what each of them runs; None for another model."""
    if not getattr(runner.model, "takes_plans", False):
        return None
    num_blocks = runner.model.config.num_hidden_layers
    _, held, counts = adapter.v1_requests(runner)
    rows = [_row(one, num_blocks) for one in held]
    attention = adapter.GroupedAttention(runner.attn_groups)
    return Batch(np.stack(rows), counts, runner.device, attention)


def _row(held: Any, num_blocks: int) -> NDArray[np.bool_]:
    """A request's row; it is read once."""
    row: NDArray[np.bool_] | None = getattr(held, "_buddy_row", None)
    if row is None:
        params = held.sampling_params
        row = held._buddy_row = row_of(None if params is None else params.extra_args, num_blocks)
    return row


def note(runner: Any, batch: Batch) -> None:
    """Add up what ran for each request, and log it when the request has gone.

    The sums are of this rank's own blocks. What is computed again after a preemption counts again.
    """
    tally: dict[str, int] = runner.__dict__.setdefault("buddy_tally", {})
    runner.buddy_total = getattr(runner, "buddy_total", 0) + int(batch.executed.sum())
    ids, _, _ = adapter.v1_requests(runner)
    for one, executed in zip(ids, batch.executed.tolist(), strict=True):
        tally[one] = tally.get(one, 0) + executed
    for one in [one for one in tally if one not in runner.requests]:
        adapter.logger().debug("request %s ran %d blocks of tokens on this rank", one, tally[one])
        del tally[one]
