"""What each token of an answer loses at each depth, and what a whole answer loses at given depths.

Passes are those of training: later tokens see what decoding under `project` and `lazy` leaves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from buddy.data.examples import Example
from buddy.model import BuddyForCausalLM
from buddy.routing.ledger import Ledger
from buddy.training.batches import Batch, collate
from buddy.training.measurements import Measurements
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


def fed(rows: Sequence[Example]) -> list[Example]:
    """Those whose answers are fed: all of an answer is, but its last token."""
    return [row for row in rows if len(row.answer) > 1]


def fed_losses(
    measurements: Measurements,
    what: str,
    examples: Sequence[Example],
    ways: Sequence[Way],
    identity: dict[str, Any],
) -> Float[Tensor, "rows fed ways"]:
    """What each fed token of answers loses on the next, in nats; pads lose none.

    Args:
        measurements: Measures what is not measured yet.
        what: Says what is measured; names its file.
        examples: Prompts and answers, of two tokens or more.
        ways: How deep the answers are fed.
        identity: What tells these ways from others, as plain values.
    """
    longest = max(len(row.answer) for row in examples) - 1

    def measure(part: Sequence[Example], places: Sequence[int]) -> Tensor:
        batch = collate(part, measurements.model.device)
        lost = torch.stack([way.losses(batch, part) for way in ways], 2)
        return pad(lost, (0, 0, 0, longest - lost.shape[1]))

    return measurements.nats(what, examples, (longest, len(ways)), identity, measure)


def ledger_identity(ledger: Ledger) -> list[Any]:
    """What tells a ledger from others, as plain values."""
    return [ledger.config.to_json(), ledger.losses.tolist(), ledger.prices.tolist()]


def level_losses(
    measurements: Measurements,
    what: str,
    model: BuddyForCausalLM,
    rows: Sequence[Example],
    levels: Sequence[int],
    prompt: int,
) -> list[TokenLosses]:
    """Every answer at every level, each at one level throughout.

    Args:
        measurements: Measures what is not measured yet.
        what: Says what is measured; names its file.
        model: Whose policy chooses the blocks.
        rows: Prompts and answers, of two tokens or more.
        levels: Blocks.
        prompt: Blocks of the prompts' tokens.
    """
    ways = [Way.level(model, prompt, blocks) for blocks in levels]
    facts = {"levels": list(levels), "prompt": prompt, "routed": model.facts()}
    lost = fed_losses(measurements, what, rows, ways, facts)
    return [_token_losses(row, nats) for row, nats in zip(rows, lost, strict=True)]


def _token_losses(example: Example, losses: Float[Tensor, "fed levels"]) -> TokenLosses:
    """Those of one answer, without the pads that follow."""
    token_ids = example.answer[:-1]
    return TokenLosses(token_ids, losses[: len(token_ids)].numpy().astype(np.float32))
