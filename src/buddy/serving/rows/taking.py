"""What a token makes of an answer: more text, and perhaps its end."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from buddy.serving.request import Delta, FinishReason
from buddy.serving.rows.row import Row
from buddy.serving.rows.sampler import Picked


def take_token(
    row: Row, picked: Picked, runs: NDArray[np.bool_], now_s: float, ends: Collection[int]
) -> tuple[Delta | None, FinishReason | None]:
    """Go on by a token; what the client hears of it, and why the answer ends with it.

    Args:
        row: Whose answer it is.
        picked: The token.
        runs: [blocks], which of them made its logits.
        now_s: When it came.
        ends: Tokens of the model that end an answer.
    """
    request, token = row.request, picked.token
    is_end = token in request.stop_tokens or (token in ends and not request.ignore_eos)
    if not is_end:
        row.picker.take(token)
    row.note_token(token, runs, now_s)
    if is_end:
        text = row.stop.push(row.text.flush())[0] + row.stop.flush()
        if not text and picked.logprobs is None:
            return None, "stop"
        return Delta(text=text, tokens=(), logprobs=picked.at(row.text.length)), "stop"
    offset = row.text.length
    text, is_stopped = row.text.push(token), False
    if len(row.answer) > request.min_tokens or not request.min_tokens:
        text, is_stopped = row.stop.push(text)
    reason: FinishReason | None = "stop" if is_stopped else None
    grammar = row.picker.grammar
    if not is_stopped and grammar is not None and grammar.is_done:
        reason = "stop"
    elif not is_stopped and len(row.answer) >= request.max_tokens:
        reason = "length"
    if reason is not None and not is_stopped:
        rest, is_stopped = row.stop.push(row.text.flush())
        text += rest if is_stopped else rest + row.stop.flush()
        reason = "stop" if is_stopped else reason
    return Delta(text=text, tokens=(token,), logprobs=picked.at(offset), runs=(runs,)), reason
