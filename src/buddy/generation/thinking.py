"""Ends thinking at a limit: from then on the closing mark is the one token that may follow."""

import math
from bisect import bisect
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
    """Keeps a limit in each row of a generation.

    What it has noted of a row is followed by the row's new tokens alone. Where the row's answer is
    another, as beams change places and drafts are taken back, it goes on from where both agree.

    Args:
        limit: Of each row.
        prompts: What the rows begin with, each as often as it is answered.

    Attributes:
        option: The name by which a user asks for it.
    """

    option: Final = "thinking_tokens"

    def __init__(self, limit: ThinkingLimit, prompts: Int[Tensor, "batch columns"]) -> None:
        self._columns = prompts.shape[1]
        self._begun = [
            ThinkingWatch(limit, limit.marks.is_open(prompt)) for prompt in prompts.tolist()
        ]
        self._rows: list[_Followed] = []

    def __call__(
        self, input_ids: Int[Tensor, "rows columns"], scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        """The scores as they are, but in rows whose thinking is to end."""
        answers = input_ids[:, self._columns :].tolist()
        if len(self._rows) != len(answers):
            copies = len(answers) // len(self._begun)
            self._rows = [_Followed(watch) for watch in self._begun for _ in range(copies)]
        closing = [
            row.follow(answer).closes for row, answer in zip(self._rows, answers, strict=True)
        ]
        if any(token is not None for token in closing):
            scores = scores.clone()
            close_thinking(scores, closing)
        return scores

    def __deepcopy__(self, memo: Any) -> "ThinkingProcessor":
        """Itself, as what it has noted decides nothing but its time; drafts copy processors."""
        return self


class _Followed:
    """The watch of one row after each token of the answer that it had last."""

    def __init__(self, watch: ThinkingWatch) -> None:
        self._answer: list[int] = []
        self._watches = [watch]

    def follow(self, answer: list[int]) -> ThinkingWatch:
        """The watch after an answer."""
        known = min(len(answer), len(self._answer))
        if answer[:known] != self._answer[:known]:
            known = bisect(range(known), 0, key=lambda n: answer[: n + 1] != self._answer[: n + 1])
        del self._watches[known + 1 :]
        for token in answer[known:]:
            self._watches.append(self._watches[-1].after(token))
        self._answer = answer
        return self._watches[-1]
