"""What each token of an answer loses at each depth, and what a whole answer loses at given depths.

Passes are those of training: later tokens see what decoding under `project` and `lazy` leaves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from buddy.data.examples import Example
from buddy.model import BuddyForCausalLM
from buddy.training.batches import Batch, collate
from buddy.training.router.evaluate import answer_pass


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The tokens of one answer that are fed, all but its last.

    Attributes:
        token_ids: [tokens].
        losses: [tokens, levels], of the next token, in nats.
    """

    token_ids: tuple[int, ...]
    losses: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Way:
    """How deep an answer is fed.

    Attributes:
        model: Whose policy chooses the blocks.
        prompt: Blocks of the prompt's tokens.
        spend: From the tokens that an answer feeds to the blocks of each.
    """

    model: BuddyForCausalLM
    prompt: int
    spend: Callable[[Sequence[int]], Sequence[int]]

    @classmethod
    def level(cls, model: BuddyForCausalLM, prompt: int, blocks: int) -> "Way":
        """The same blocks at every token of the answer."""
        return cls(model, prompt, lambda token_ids: [blocks] * len(token_ids))

    def losses(self, batch: Batch, part: Sequence[Example]) -> Float[Tensor, "rows fed"]:
        """What each fed token of some answers loses on the next, in nats, float64; pads lose none.

        Args:
            batch: Of the same answers.
            part: The answers.
        """
        depths = torch.full_like(batch.token_ids, self.prompt)
        for row, example in enumerate(part):
            blocks = list(self.spend(example.answer[:-1]))
            first = len(example.prompt)
            depths[row, first : first + len(blocks)] = torch.tensor(blocks).to(depths)
        losses = answer_pass(self.model, batch, depths)[1].cpu().double()
        longest = max(len(example.answer) for example in part)
        padded = torch.zeros(len(part), longest - 1, dtype=losses.dtype)
        lengths = [len(example.answer) for example in part]
        for row, mine in enumerate(torch.split(losses, lengths)):
            padded[row, : len(mine) - 1] = mine[1:]
        return padded


def measure_levels(
    model: BuddyForCausalLM,
    examples: Sequence[Example],
    levels: Sequence[int],
    prompt: int,
    *,
    batch_size: int,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> list[TokenLosses]:
    """Every answer at every level, each at one level throughout.

    Args:
        model: Whose policy chooses the blocks.
        examples: Those of one answer token feed none, and are left out.
        levels: Blocks.
        prompt: Blocks of the prompts' tokens.
        batch_size: Examples at a time.
        on_rows: Told how many examples are done.
    """
    answers, ways = [], [Way.level(model, prompt, blocks) for blocks in levels]
    for batch, part in _batches(model, examples, batch_size):
        losses = torch.stack([way.losses(batch, part) for way in ways], 2)
        answers += [token_losses(*one) for one in zip(part, losses, strict=True)]
        on_rows(len(answers))
    return answers


def token_losses(example: Example, losses: Float[Tensor, "fed levels"]) -> TokenLosses:
    """Those of one answer, without the pads that follow."""
    fed = example.answer[:-1]
    return TokenLosses(fed, losses[: len(fed)].numpy().astype(np.float32))


def measure_depths(
    model: BuddyForCausalLM,
    examples: Sequence[Example],
    spend: Callable[[Sequence[int]], Sequence[int]],
    prompt: int,
    *,
    batch_size: int,
) -> tuple[list[float], list[list[int]]]:
    """What each answer loses when its tokens run at depths of their own.

    Args:
        model: Whose policy chooses the blocks.
        examples: Those of one answer token feed none, and are left out.
        spend: From the tokens that an answer feeds to the blocks of each.
        prompt: Blocks of the prompts' tokens.
        batch_size: Examples at a time.

    Returns:
        Of each answer, the nats of the tokens after its first, and the blocks of the tokens that
        were fed.
    """
    lost, ran = list[float](), list[list[int]]()
    for batch, part in _batches(model, examples, batch_size):
        lost += Way(model, prompt, spend).losses(batch, part).sum(1).tolist()
        ran += [list(spend(example.answer[:-1])) for example in part]
    return lost, ran


def _batches(
    model: BuddyForCausalLM, examples: Sequence[Example], size: int
) -> Iterator[tuple[Batch, Sequence[Example]]]:
    """Answers of more than one token, those of a batch alike in length."""
    longer = [example for example in examples if len(example.answer) > 1]
    ordered = sorted(longer, key=lambda example: example.num_tokens)
    for start in range(0, len(ordered), size):
        part = ordered[start : start + size]
        yield collate(part, model.device), part
