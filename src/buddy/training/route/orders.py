"""Removal orders by racing: in each round candidates leave as soon as they are surely behind.

The SLEB loop measures every block that is left on every row, and most of them lose by far. Here a
round goes through the rows batch by batch; a candidate that is behind the best by some standard
errors of the paired difference is not measured on the rest. The rounds after the first try those
blocks alone whose absence cost least before.

One block at a time never finds blocks that are cheap together and dear alone. So a round also
tries the first blocks of another order, and goes on from them where they lose less.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Bool
from torch import Tensor

from buddy.data.examples import Example
from buddy.errors import TrainingError
from buddy.records import RunRecord, read_record
from buddy.resume import check_same, opened, sealed
from buddy.training.answer_losses import Losses

Measure = Callable[[Sequence[Example], Bool[Tensor, "one sets blocks"]], Losses]
"""What some answers lose under some sets."""


@dataclass(frozen=True, slots=True)
class Round:
    """What a round found.

    Attributes:
        best: Place of the best set.
        mean: Nats a token under it, over all rows.
        behind: Nats a token that each set loses more, paired, over the rows it was measured on.
        num_measured: Rows times sets.
    """

    best: int
    mean: float
    behind: tuple[float, ...]
    num_measured: int


def race(
    measure: Measure,
    batches: Sequence[Sequence[Example]],
    sets: Bool[Tensor, "sets blocks"],
    leave: float,
) -> Round:
    """The set under which the answers lose least.

    Args:
        measure: Gives the losses.
        batches: Rows, in parts.
        sets: Candidates.
        leave: Standard errors of the paired difference to the best so far, beyond which a candidate
            leaves.
    """
    alive, measured = list(range(len(sets))), 0
    lost: dict[int, list[Tensor]] = {place: [] for place in alive}
    tokens: list[Tensor] = []

    def so_far(places: Sequence[int], parts: int) -> Losses:
        nats = [torch.cat(lost[place][:parts]) for place in places]
        return Losses(torch.stack(nats, 1), torch.cat(tokens[:parts]))

    for rows in batches:
        part = measure(rows, sets[alive][None])
        measured += part.nats.numel()
        tokens.append(part.tokens)
        for column, place in enumerate(alive):
            lost[place].append(part.nats[:, column])
        now = so_far(alive, len(tokens))
        behind, error = now.behind(now.nats[:, int(now.mean.argmin())])
        leaves = now.is_sure(behind, error, leave).tolist()
        alive = [place for place, is_gone in zip(alive, leaves, strict=True) if not is_gone]
    whole = so_far(alive, len(tokens))
    best = alive[int(whole.mean.argmin())]
    # Batches differ far more than blocks do: a candidate that left is held against the best on the
    # rows that both were measured on.
    apart = []
    for place in range(len(sets)):
        both = so_far([place, best], len(lost[place]))
        apart.append(float(both.behind(both.nats[:, 1])[0][0]))
    return Round(best, float(whole.mean.min()), tuple(apart), measured)


@dataclass(slots=True)
class OrderSearch:
    """A removal order as far as it is searched; the ends are never removed.

    Attributes:
        removed: Blocks, in their order.
        means: Nats a token: of full depth, then after each removal.
        prices: What the absence of each block cost when it was tried last, in nats a token.
        num_measured: Rows times sets.
    """

    removed: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    prices: dict[int, float] = field(default_factory=dict)
    num_measured: int = 0

    def step(
        self,
        measure: Measure,
        batches: Sequence[Sequence[Example]],
        num_blocks: int,
        *,
        candidates: int,
        leave: float,
        lead: Sequence[int] = (),
    ) -> None:
        """Remove one more block, or as many of another order; the first measures full depth too."""
        rest = [block for block in range(1, num_blocks - 1) if block not in self.removed]
        is_first = not self.means
        if not is_first:
            rest = sorted(rest, key=lambda block: self.prices[block])[:candidates]
        found = [[*self.removed, block] for block in rest]
        led = list(lead[: len(self.removed) + 1])
        if len(led) == len(found[0]) and set(led) not in map(set, found):
            found.append(led)
        sets = torch.ones(len(found), num_blocks, dtype=torch.bool)
        for row, removed in enumerate(found):
            sets[row, removed] = False
        if is_first:
            whole = torch.ones(1, 1, num_blocks, dtype=torch.bool)
            parts = [measure(rows, whole) for rows in batches]
            self.means.append(float(Losses.joined(parts).mean))
        ended = race(measure, batches, sets, leave)
        least = ended.mean - self.means[-1]
        self.prices |= {b: least + behind for b, behind in zip(rest, ended.behind, strict=False)}
        self.removed = found[ended.best]
        self.means.append(ended.mean)
        self.num_measured += ended.num_measured

    def to_json(self) -> dict[str, Any]:
        """Plain values: what a record of the search holds."""
        return {
            "removal_order": self.removed,
            "nats": self.means,
            "prices": {str(block): price for block, price in sorted(self.prices.items())},
            "num_measured": self.num_measured,
        }


KIND: Final = "route-order"


def search_order(
    measure: Measure,
    rows: Sequence[Sequence[Example]],
    path: Path,
    *,
    num_blocks: int,
    rounds: int,
    candidates: int,
    leave: float,
    identity: Mapping[str, Any],
    model: dict[str, Any],
    lead: Sequence[int] = (),
    until: int | None = None,
    on_round: Callable[[int], None] = lambda done: None,
) -> OrderSearch:
    """Search an order, or go on from the rounds that its record has.

    Args:
        measure: Gives the losses.
        rows: Prompts and answers, in batches.
        path: Record of the order, written after each round.
        num_blocks: How many the model has.
        rounds: Blocks to remove.
        candidates: Blocks that a round after the first tries.
        leave: As for `race`.
        identity: What else the result depends on, as plain values.
        model: Facts of the model.
        lead: Another order, whose first blocks each round tries.
        until: Stop once so many blocks are gone, and go on by another call.
        on_round: Told how many blocks are gone.

    Raises:
        TrainingError: The record is damaged, or of another search.
        ModelError: A loss is not a number.
    """
    config = {**identity, "rounds": rounds, "candidates": candidates, "leave": leave}
    search = _read(path, config, model)
    on_round(len(search.removed))
    while len(search.removed) < min(rounds, until or rounds):
        search.step(measure, rows, num_blocks, candidates=candidates, leave=leave, lead=lead)
        results = sealed(search.to_json(), config, model)
        RunRecord(kind=KIND, model=model, config=config, results=results).save(path)
        on_round(len(search.removed))
    return search


def _read(path: Path, config: dict[str, Any], model: dict[str, Any]) -> OrderSearch:
    if not path.exists():
        return OrderSearch()
    record = read_record(path)
    saved = {"model": record.get("model"), "config": record["config"]}
    check_same(
        saved,
        {"model": model, "config": config},
        f"{path} is of another search",
        "delete it to search again, or name another --out",
        TrainingError,
    )
    found, is_whole = opened(record["results"], config, model)
    if not is_whole:
        raise TrainingError(f"{path} is damaged: delete it to search again")
    return OrderSearch(
        removed=found["removal_order"],
        means=found["nats"],
        prices={int(block): price for block, price in found["prices"].items()},
        num_measured=found["num_measured"],
    )
