"""Groups of prompts, and the parts of their rows: one to search on, one to confirm, one to check.

No row is in two parts of its group, so that what is chosen on one tells nothing of another.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.data.examples import Example
from buddy.errors import DataError
from buddy.training.route.recipe import SearchSettings
from buddy.training.summaries import Standard

GROUPS: Final = 6
"""Groups that are looked for where the rows name no sources."""
LEAST_ROWS: Final = 10
"""Rows of a group, at least: less tells nothing of three parts."""
_SHARES: Final = (0.4, 0.3)
"""Of a group's rows: searched on, confirmed on. The rest is for the check."""
_TURNS: Final = 100
"""Of k-means, at most."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of like prompts.

    Attributes:
        search: An order is searched on these.
        confirm: It must be better than the common one on these.
        check: Figures are of these; nothing is chosen on them.
        fit: The router learns these prompts; none of them is in `check`.
    """

    search: tuple[Example, ...]
    confirm: tuple[Example, ...]
    check: tuple[Example, ...]
    fit: tuple[Example, ...]


def split_groups(
    train: Mapping[str, Sequence[Example]],
    validation: Mapping[str, Sequence[Example]],
    settings: SearchSettings,
    *,
    prompts: int,
    seed: int,
) -> dict[str, Group]:
    """The groups in alphabetical order, each in its parts.

    Args:
        train: Rows by group.
        validation: Rows for the check by group; a group without any gives some of its own.
        settings: Sizes of the parts.
        prompts: That the router learns from each, at most.
        seed: Of the draw.

    Raises:
        DataError: A group has too few rows.
    """
    return {
        name: _split(name, rows, validation.get(name, ()), settings, prompts, seed)
        for name, rows in sorted(train.items())
    }


def _split(
    name: str,
    train: Sequence[Example],
    validation: Sequence[Example],
    settings: SearchSettings,
    prompts: int,
    seed: int,
) -> Group:
    draw = random.Random(f"{seed} {name}")
    known = {example.prompt for example in validation}
    rows = [row for row in dict.fromkeys(train) if row.prompt not in known]
    if len(rows) < LEAST_ROWS:
        raise DataError(
            f"{len(rows)} different rows of {name}: expected {LEAST_ROWS} at least; add rows of "
            "it, or leave it out"
        )
    draw.shuffle(rows)
    search, confirm = (max(2, int(share * len(rows))) for share in _SHARES)
    if validation:
        search = len(rows) - confirm
        check = draw.sample(list(validation), min(settings.check_rows, len(validation)))
    else:
        check = rows[search + confirm :][: settings.check_rows]
    searched = rows[:search][: settings.rows]
    confirming = rows[search : search + confirm][: settings.confirm_rows]
    seen = {example.prompt for example in check}
    fit = [row for row in rows if row.prompt not in seen][:prompts]
    return Group(tuple(searched), tuple(confirming), tuple(check), tuple(fit))


def by_source(examples: Sequence[Example]) -> dict[str, list[Example]]:
    """Rows by the source that they name."""
    groups: dict[str, list[Example]] = {}
    for example in examples:
        groups.setdefault(example.source, []).append(example)
    return groups


@dataclass(frozen=True, slots=True)
class Clusters:
    """Groups among what the router sees.

    Attributes:
        standard: Standardises summaries.
        centres: Of the groups, standardised.
    """

    standard: Standard
    centres: Float[Tensor, "groups summary"]

    @classmethod
    def of(cls, summaries: Float[Tensor, "prompts summary"], most: int, seed: int) -> "Clusters":
        """As many groups as may be, of `LEAST_ROWS` prompts or more each.

        Args:
            summaries: What the router sees of each prompt.
            most: Of groups.
            seed: Of where they begin.
        """
        standard = Standard.of(summaries)
        points = standard(summaries)
        for number in range(max(1, min(most, len(points) // LEAST_ROWS)), 1, -1):
            found = cls(standard, _centres(points, number, seed))
            if int(torch.bincount(found(summaries), minlength=number).min()) >= LEAST_ROWS:
                return found
        return cls(standard, points.mean(0, keepdim=True))

    def __call__(self, summaries: Float[Tensor, "prompts summary"]) -> Int[Tensor, " prompts"]:
        """The group of each prompt: the nearest."""
        return _nearest(self.standard(summaries), self.centres)


def _centres(
    points: Float[Tensor, "prompts summary"], number: int, seed: int
) -> Float[Tensor, "groups summary"]:
    """K-means, begun as k-means++ does."""
    draw = torch.Generator().manual_seed(seed)
    centres = points[torch.randint(len(points), (1,), generator=draw)]
    while len(centres) < number:
        far = torch.cdist(points, centres).amin(1).square()
        weights = far if bool(far.sum() > 0) else torch.ones_like(far)
        centres = torch.cat([centres, points[torch.multinomial(weights, 1, generator=draw)]])
    for _ in range(_TURNS):
        members = [points[_nearest(points, centres) == group] for group in range(number)]
        moved = torch.stack(
            [some.mean(0) if len(some) else centres[g] for g, some in enumerate(members)]
        )
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres


def _nearest(
    points: Float[Tensor, "prompts summary"], centres: Float[Tensor, "groups summary"]
) -> Int[Tensor, " prompts"]:
    return torch.cdist(points, centres).argmin(1)
