"""Ends thinking at a limit: from then on the closing mark is the one token that may follow."""

import math
from collections.abc import Sequence
from typing import Any, Final

from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessor

from buddy.budget.thinking import ThinkingLimit, ThinkingWatch


def close_thinking(logits: Float[Tensor, "rows vocab"], closing: Sequence[int | None]) -> None:
    """Let nothing but the closing mark follow in some rows, in place.

    Args:
        logits: Of each row.
        closing: Of each row, the mark's token; None where any token may follow.
    """
    for row, token in enumerate(closing):
        if token is not None:
            logits[row] = -math.inf
            logits[row, token] = 0.0


class ThinkingProcessor(LogitsProcessor):
    """Keeps a limit in each row of a generation. It keeps no state, so that beams may change rows.

    Args:
        limit: Of each row.
        prompts: What the rows begin with, each as often as it is answered.

    Attributes:
        option: The name by which a user asks for it.
    """

    option: Final = "thinking_tokens"

    def __init__(self, limit: ThinkingLimit, prompts: Int[Tensor, "batch columns"]) -> None:
        self._limit, self._columns = limit, prompts.shape[1]
        self._are_open = [limit.marks.is_open(prompt) for prompt in prompts.tolist()]

    def __call__(
        self, input_ids: Int[Tensor, "rows columns"], scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        """The scores as they are, but in rows whose thinking is to end."""
        copies = len(input_ids) // len(self._are_open)
        closing = []
        for row, answer in enumerate(input_ids[:, self._columns :].tolist()):
            watch = ThinkingWatch(self._limit, is_open=self._are_open[row // copies])
            for token in answer:
                watch.take(token)
            closing.append(watch.closes)
        if any(token is not None for token in closing):
            scores = scores.clone()
            close_thinking(scores, closing)
        return scores

    def __deepcopy__(self, memo: Any) -> "ThinkingProcessor":
        """Itself, as it never changes; drafts copy processors."""
        return self
