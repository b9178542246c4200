"""The paper's two observations: importance depends on the input, and changes with its context."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.importance.indicators.measure import OnBatch, finite, gather
from buddy.lab.observe.agreement import halves, moved, over_inputs, rank_blocks
from buddy.lab.observe.inputs import EachInput, EachToken
from buddy.resume import ResumeFile

_BY_TOKEN: Final = "delta-ppl"
"""The indicator that one pass gives for every stretch of an input."""


def observe_ranks(
    indicator: str,
    backbone: Backbone,
    inputs: Int[Tensor, "inputs tokens"],
    *,
    batch: int,
    file: ResumeFile,
    on_batch: OnBatch,
) -> dict[str, Any]:
    """Measure each input alone, and rank the blocks by it.

    Args:
        indicator: By name.
        backbone: The model.
        inputs: At least two, without pads.
        batch: Inputs at a time.
        file: Holds all that was measured at the end.
        on_batch: Told of progress.

    Returns:
        `ranks` and `scores`, [inputs, blocks]; `agreement`, how rankings differ over inputs, and
        whether the halves of one input agree better than those of two.

    Raises:
        ModelError: A score is NaN or infinite.
        ResultError: The file is of another measurement, damaged, or cannot be written.
    """
    tokens = inputs.shape[1]
    stretches = [(0, tokens), (0, tokens // 2), (tokens // 2, tokens)]
    scores = _scores(indicator, backbone, inputs, stretches, batch, file, on_batch)
    ranks, first, second = rank_blocks(scores).unbind(1)
    return {
        "ranks": ranks.tolist(),
        "scores": [[float(f"{score:.6g}") for score in row] for row in scores[:, 0].tolist()],
        "agreement": over_inputs(ranks) | halves(first, second),
    }


def observe_context(
    indicator: str,
    backbone: Backbone,
    inputs: Int[Tensor, "inputs tokens"],
    contexts: Sequence[int],
    *,
    batch: int,
    file: ResumeFile,
    on_batch: OnBatch,
) -> dict[str, Any]:
    """Rank the blocks by the first tokens of each input, more and more of them.

    Args:
        indicator: By name.
        backbone: The model.
        inputs: At least two, as long as the longest context.
        contexts: Ascending, in tokens; at least two.
        batch: Inputs at a time.
        file: Holds all that was measured at the end.
        on_batch: Told of progress.

    Returns:
        `ranks` and `stderr`, [contexts, blocks], mean over inputs and its standard error;
        `input_ranks`, [inputs, contexts, blocks]; `growth`, how rankings change from the first
        context to the last; `agreement`, how those of the last differ over inputs. By delta-PPL
        also `stretches`, how rankings change between as many tokens just before the first
        context's end and just before the last's, none in both: the ranking of a longer context
        has more tokens, so it is less noisy, and that alone would make blocks seem to move.

    Raises:
        ModelError: A score is NaN or infinite.
        ResultError: The file is of another measurement, damaged, or cannot be written.
    """
    first, last = contexts[0], contexts[-1]
    apart = min(first, last - first)
    stretches = [(0, context) for context in contexts]
    if indicator == _BY_TOKEN:
        stretches += [(first - apart, first), (last - apart, last)]
    scores = _scores(indicator, backbone, inputs, stretches, batch, file, on_batch)
    every_rank = rank_blocks(scores)
    ranks, ends = every_rank[:, : len(contexts)], every_rank[:, len(contexts) :]
    results = {
        "contexts": list(contexts),
        "ranks": ranks.double().mean(0).tolist(),
        "stderr": (ranks.double().std(0) / len(inputs) ** 0.5).tolist(),
        "input_ranks": ranks.tolist(),
        "growth": moved(ranks[:, 0], ranks[:, -1]),
        "agreement": over_inputs(ranks[:, -1]),
    }
    if indicator == _BY_TOKEN:
        results["stretches"] = {"tokens": apart, **moved(*ends.unbind(1))}
    return results


def _scores(
    indicator: str,
    backbone: Backbone,
    inputs: Int[Tensor, "inputs tokens"],
    stretches: Sequence[tuple[int, int]],
    batch: int,
    file: ResumeFile,
    on_batch: OnBatch,
) -> Float[Tensor, "inputs stretches blocks"]:
    """Scores by input and stretch; by delta-PPL given all before, by others by itself alone."""
    if indicator == _BY_TOKEN:
        by_token = EachToken(backbone)
        gather(by_token, inputs, batch=batch, file=file, on_batch=on_batch, keep=True)
        return finite(torch.stack([by_token.rises(*stretch) for stretch in stretches], 1))
    each = EachInput(indicator, backbone, stretches)
    gather(each, inputs, batch=batch, file=file, on_batch=on_batch, keep=True)
    return finite(each.scores())
