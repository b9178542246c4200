"""Scores of a prompt's tokens: logits of its parts are reduced to what is asked as they come."""

from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from buddy.depth.wide import widened
from buddy.errors import ModelError
from buddy.serving.request import PromptScores

TOGETHER: Final = 32
"""Tokens whose logits are held at once: as many as the compiled kernel makes in one go."""


class PromptScorer:
    """Scores the tokens of one prompt from the second on, in their order.

    Room for all of them is taken at once, so that nothing runs out of memory later.

    Args:
        prompt: [tokens], ids.
        top: Alternatives that come with each logprob.

    Attributes:
        failure: What went wrong while it was given logits; its request ends by it.
    """

    def __init__(self, prompt: NDArray[np.int64], top: int) -> None:
        self._next = prompt[1:]
        shape = (len(self._next), top)
        self.scores = PromptScores(
            logprobs=np.empty(len(self._next), np.float32),
            ranks=np.empty(len(self._next), np.int32),
            top_tokens=np.empty(shape, np.int32),
            top_logprobs=np.empty(shape, np.float32),
        )
        self._taken = 0
        self.failure: BaseException | None = None

    @property
    def left(self) -> int:
        """Tokens that have no score yet."""
        return len(self._next) - self._taken

    def take(self, logits: Float[Tensor, "lanes vocab"]) -> None:
        """Score the next tokens. The host waits for a GPU here.

        Args:
            logits: Of the tokens before each of them; the model's own, with no penalty and no bias.

        Raises:
            ModelError: Some are no numbers.
        """
        scores, part = self.scores, slice(self._taken, self._taken + len(logits))
        tokens = torch.as_tensor(self._next[part], device=logits.device)
        logprobs = logits.detach().float().log_softmax(-1)
        own = logprobs.gather(1, tokens[:, None])
        ranks = (logprobs > own).sum(-1, keepdim=True) + 1
        values, best = logprobs.topk(scores.top_tokens.shape[1], dim=-1)
        found = torch.cat([widened(own), widened(ranks), widened(best), widened(values)], 1)
        numbers = found.cpu().numpy()
        if np.isnan(numbers).any():
            raise ModelError(
                "the logits of this prompt are not finite: the model's weights are damaged, or too "
                "large for their number format"
            )
        scores.logprobs[part], scores.ranks[part] = numbers[:, 0], numbers[:, 1]
        scores.top_tokens[part], scores.top_logprobs[part] = np.split(numbers[:, 2:], 2, 1)
        self._taken += len(logits)
