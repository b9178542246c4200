"""Batches: which examples each step sees, fixed by the seed alone, whoever computes them."""

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from buddy.data.examples import Example
from buddy.errors import RecipeError
from buddy.model import BuddyForCausalLM

_GROUP = 50
"""Batches whose examples are sorted by length together: little padding, still well mixed."""
_ROUND = 16
"""Rows are padded to a multiple of this: fewer shapes to prepare a matrix product for."""


def check_context(
    max_tokens: int, model: BuddyForCausalLM, named: str = "the model's context"
) -> None:
    """Refuse examples that a model's context does not hold.

    Args:
        max_tokens: Of an example, at most: `data.max_tokens`.
        model: That runs them, or its outline.
        named: What the message calls its context.

    Raises:
        RecipeError: They may be longer.
    """
    if max_tokens > model.backbone.context:
        raise RecipeError(
            f"data.max_tokens must be at most {model.backbone.context:,}, {named}, got "
            f"{max_tokens:,}"
        )


def rows_identity(examples: Sequence[Example]) -> str:
    """SHA-256 of prompts and answers, in their order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.prompt, example.answer)).encode())
    return digest.hexdigest()


def by_length(examples: Sequence[Example], size: int) -> Iterator[tuple[list[int], list[Example]]]:
    """Examples of like length side by side, with their places; each once."""
    order = sorted(range(len(examples)), key=lambda place: examples[place].num_tokens)
    for start in range(0, len(order), size):
        places = order[start : start + size]
        yield places, [examples[place] for place in places]


def order_of_epoch(examples: Sequence[Example], batch_size: int, seed: int) -> list[list[int]]:
    """All examples once, in batches of similar length.

    Args:
        examples: Of which `order_of_epoch` gives the places.
        batch_size: Examples a batch; what is left over at the end is dropped.
        seed: Fixes the order; use another for each epoch.
    """
    draw = random.Random(seed)
    places = list(range(len(examples)))
    draw.shuffle(places)
    batches = []
    for start in range(0, len(places), _GROUP * batch_size):
        group = places[start : start + _GROUP * batch_size]
        group.sort(key=lambda place: examples[place].num_tokens)
        batches += [group[at : at + batch_size] for at in range(0, len(group), batch_size)]
    batches = [batch for batch in batches if len(batch) == batch_size]
    draw.shuffle(batches)
    return batches


def draw_rows(examples: list[Example], most: int, seed: int) -> list[Example]:
    """Draw at most so many of them at random; all in their order if they are no more."""
    return examples if len(examples) <= most else random.Random(seed).sample(examples, most)


def check_rows(examples: Sequence[Example], batch_size: int) -> None:
    """Refuse training rows that do not fill one batch.

    Raises:
        RecipeError: They do not.
    """
    if len(examples) < batch_size:
        raise RecipeError(f"{len(examples)} training rows do not fill one batch of {batch_size}")


class BatchOrder:
    """The batch of any step, computed from the seed: resuming needs no sampler state.

    Raises:
        RecipeError: There are not enough rows for one batch.
    """

    def __init__(self, examples: Sequence[Example], batch_size: int, seed: int) -> None:
        check_rows(examples, batch_size)
        self.examples = examples
        self.per_epoch = len(order_of_epoch(examples, batch_size, 0))
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._batches: list[list[int]] = []

    def __getitem__(self, step: int) -> list[Example]:
        """The examples of a step, counted from 0 over all epochs."""
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._batches = order_of_epoch(
                self.examples, self._batch_size, self._seed * 1_000_003 + epoch
            )
            self._epoch = epoch
        return [self.examples[at] for at in self._batches[place]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples side by side, padded on the right.

    Attributes:
        token_ids: Prompt, answer, pads.
        is_prompt: What a route may see.
        rows: Row of each position whose next token is part of an answer.
        columns: Column of each such position.
        targets: The answer tokens.
    """

    token_ids: Int[Tensor, "batch tokens"]
    is_prompt: Bool[Tensor, "batch tokens"]
    rows: Int[Tensor, " answers"]
    columns: Int[Tensor, " answers"]
    targets: Int[Tensor, " answers"]

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Tokens of each row, its answer's last one included."""
        return self.is_prompt.sum(1) + self.answer_tokens

    @property
    def is_pad(self) -> Bool[Tensor, "batch tokens"]:
        """What follows a row's last token."""
        columns = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        return columns >= self.lengths[:, None]

    @property
    def answer_tokens(self) -> Int[Tensor, " batch"]:
        """Length of each row's answer."""
        return torch.bincount(self.rows, minlength=len(self.token_ids))


def padded_width(examples: Sequence[Example]) -> int:
    """Columns of the examples side by side."""
    longest = max(example.num_tokens for example in examples)
    return -(-longest // _ROUND) * _ROUND


def micro_batches(examples: Sequence[Example], rows: Iterable[int], most: int) -> list[list[int]]:
    """Rows in their order, in parts that are computed one after the other.

    Args:
        examples: Of a batch.
        rows: Places of some of them.
        most: Tokens of a part as a rectangle, its rows times the longest; 0 = all in one part. A
            row that has more is a part of its own.
    """
    parts, longest = list[list[int]](), 0
    for row in rows:
        longest = max(longest, examples[row].num_tokens)
        if not parts or (most and (len(parts[-1]) + 1) * longest > most):
            parts.append([])
            longest = examples[row].num_tokens
        parts[-1].append(row)
    return parts


def collate(examples: Sequence[Example], device: torch.device | str = "cpu") -> Batch:
    """Lay examples side by side. Pads stand right, so no causal token ever sees one."""
    token_ids = torch.zeros(len(examples), padded_width(examples), dtype=torch.long)
    is_prompt = torch.zeros_like(token_ids, dtype=torch.bool)
    rows: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    for row, example in enumerate(examples):
        prompt, answer = len(example.prompt), len(example.answer)
        token_ids[row, : prompt + answer] = torch.tensor(example.prompt + example.answer)
        is_prompt[row, :prompt] = True
        rows += [row] * answer
        columns += range(prompt - 1, prompt + answer - 1)
        targets += example.answer
    places = (torch.tensor(numbers, device=device) for numbers in (rows, columns, targets))
    return Batch(token_ids.to(device), is_prompt.to(device), *places)
