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
    _, requests, counts = adapter.v1_requests(runner)
    rows = [_row(request, num_blocks) for request in requests]
    attention = adapter.GroupedAttention(runner.attn_groups)
    return Batch(np.stack(rows), counts, runner.device, attention)


def _row(request: Any, num_blocks: int) -> NDArray[np.bool_]:
    """A request's row; it is read once."""
    row: NDArray[np.bool_] | None = getattr(request, "_buddy_row", None)
    if row is None:
        params = request.sampling_params
        row = request._buddy_row = row_of(None if params is None else params.extra_args, num_blocks)
    return row


def note(runner: Any, batch: Batch) -> None:
    """Add up what ran for each request, and log it when the request has gone.

    The sums are of this rank's own blocks. What is computed again after a preemption counts again.
    """
    tally: dict[str, int] = runner.__dict__.setdefault("buddy_tally", {})
    runner.buddy_total = getattr(runner, "buddy_total", 0) + int(batch.executed.sum())
    ids, _, _ = adapter.v1_requests(runner)
    for name, executed in zip(ids, batch.executed.tolist(), strict=True):
        tally[name] = tally.get(name, 0) + executed
    for name in [name for name in tally if name not in runner.requests]:
        adapter.logger().debug("request %s ran %d blocks of tokens on this rank", name, tally[name])
        del tally[name]
