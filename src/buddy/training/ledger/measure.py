"""What each token of an answer loses at each depth, and what a whole answer loses at given depths.

Passes are those of training: later tokens see what decoding under `project` and `lazy` leaves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

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
    answers = []
    for batch, part in _batches(model, examples, batch_size):
        by_level = []
        for level in levels:
            depths = torch.full_like(batch.token_ids, level)
            depths[batch.is_prompt] = prompt
            by_level.append(answer_pass(model, batch, depths)[1].cpu().numpy())
        losses = np.stack(by_level, 1)
        for row, example in enumerate(part):
            mine = losses[(batch.rows == row).cpu().numpy()]
            answers.append(TokenLosses(example.answer[:-1], mine[1:]))
        on_rows(len(answers))
    return answers


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
    lost, ran = [], []
    for batch, part in _batches(model, examples, batch_size):
        depths = torch.full_like(batch.token_ids, prompt)
        for row, example in enumerate(part):
            blocks = list(spend(example.answer[:-1]))
            ran.append(blocks)
            first = len(example.prompt)
            depths[row, first : first + len(blocks)] = torch.tensor(blocks).to(depths)
        losses = answer_pass(model, batch, depths)[1].cpu().double()
        for row in range(len(part)):
            lost.append(float(losses[(batch.rows == row).cpu()][1:].sum()))
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
