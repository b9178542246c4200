"""The next token from logits: between two steps it is the calls that cost, so there are few.

A step drives all else out of the processor's caches. Over a vocabulary of 49,152 torch's argmax
then takes twenty times numpy's time (65 to 3 microseconds), and its logsumexp over a quarter of
that four times (330 to 80). On a GPU it is the waits that cost: nothing here but `written` waits.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessor

from buddy.errors import ModelError

_NO_TOKEN: Final = -1
"""The token of a row whose logits are not finite, on a device: the host reads it as any other."""


class FiniteLogits(LogitsProcessor):
    """Refuses logits that no token can be chosen by, before any is.

    Minus infinity is how a token is forbidden, so the largest logit of a row is what must be a
    number.
    """

    def __call__(
        self, input_ids: Int[Tensor, "batch columns"], scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        """The logits as they are.

        Raises:
            ModelError: A row's are NaN or infinite.
        """
        largest = _on_host(scores).max(-1) if _is_quick(scores) else scores.amax(-1).tolist()
        if not np.isfinite(largest).all():
            raise _not_finite(input_ids.shape[1])
        return scores


def process(
    processors: Sequence[LogitsProcessor],
    ids: Int[Tensor, "batch columns"],
    logits: Float[Tensor, "rows vocab"],
) -> Float[Tensor, "rows vocab"]:
    """What transformers' list of processors makes of logits, without its look at each signature."""
    for processor in processors:
        logits = processor(ids, logits)
    return logits


def next_token(scores: Float[Tensor, "batch vocab"], do_sample: bool) -> Int[Tensor, " batch"]:
    """Drawn from the scores, or the best; on a GPU -1 where they are not finite."""
    if scores.device.type == "cpu":
        if do_sample:
            return torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
        return best_token(scores)
    largest, token = scores.max(-1)
    if do_sample:  # as `multinomial` draws, which looks at its weights on the host first
        weights = scores.softmax(-1)
        token = (weights / torch.empty_like(weights).exponential_()).argmax(-1)
    return torch.where(largest.isfinite(), token, _NO_TOKEN)


def written(token: Int[Tensor, " batch"], columns: int) -> list[int]:
    """The tokens on the host, which waits for a GPU here, once a step.

    Raises:
        ModelError: The logits after so many columns were not finite.
    """
    tokens: list[int] = token.tolist()
    if _NO_TOKEN in tokens:
        raise _not_finite(columns)
    return tokens


def best_token(scores: Float[Tensor, "batch vocab"]) -> Int[Tensor, " batch"]:
    """The first of the best, of each row."""
    if not _is_quick(scores):
        return scores.argmax(-1)
    return torch.from_numpy(_on_host(scores).argmax(-1))


def best_and_chances(
    logits: Float[Tensor, "rows vocab"],
) -> tuple[Int[Tensor, " rows"], list[float]]:
    """The first of the best, of each row, and their probabilities."""
    best = best_token(logits)
    if not _is_quick(logits):
        of_best = logits.gather(-1, best[:, None])[:, 0]
        return best, (of_best - logits.logsumexp(-1)).exp().tolist()
    scores = _on_host(logits)
    largest = np.take_along_axis(scores, best.numpy()[:, None], -1)
    return best, (1 / np.exp(scores - largest).sum(-1)).tolist()


def _not_finite(tokens: int) -> ModelError:
    return ModelError(
        f"the logits after {tokens} tokens are not finite: the weights are damaged, or too large "
        "for their number format; fetch or copy the model again, or load it with "
        "dtype=torch.float32"
    )


def _is_quick(scores: Tensor) -> bool:
    """Whether numpy can read them where they are."""
    return scores.device.type == "cpu" and scores.dtype is not torch.bfloat16


def _on_host(scores: Float[Tensor, "rows vocab"]) -> NDArray[np.floating]:
    return scores.detach().numpy()
