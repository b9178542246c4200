"""Groups of prompts, and the parts of their rows: one to search on, one to confirm, one to check.

No prompt is in two parts, so that what is chosen on one tells nothing of another.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.data.examples import Example
from buddy.errors import DataError, RecipeError, shown
from buddy.training.batches import draw_rows
from buddy.training.route.recipe import SearchSettings
from buddy.training.summaries import Standard

RESERVED: Final = ("all prompts", "full depth", "prior", "routed")
"""Names of what is compared with the orders of the groups."""
COMMON, FULL, PRIOR, ROUTED = RESERVED
MOST_GROUPS: Final = 64
GROUPS: Final = 6
"""Groups that are looked for where the rows name no sources."""
LEAST_ROWS: Final = 10
"""Prompts of a group, at least: fewer tell nothing of three parts."""
_SHARES: Final = (0.4, 0.3)
"""Shares of a group's rows: searched on, confirmed on. The rest is for the check."""
_TURNS: Final = 100
"""Turns of k-means, at most."""


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
        train: Rows by group, each prompt once.
        validation: Rows for the check by group; a group without any gives some of its own. None of
            their prompts is in `train`.
        settings: Sizes of the parts.
        prompts: How many of each the router learns from, at most.
        seed: Fixes the draw.

    Raises:
        DataError: As `check_groups`.
    """
    check_groups(train)
    groups = {}
    for name, rows in sorted(train.items()):
        draw = random.Random(f"{seed} {name}")
        mixed = draw.sample(list(rows), len(rows))
        search, confirm = (max(2, int(share * len(rows))) for share in _SHARES)
        if name in validation:
            search = len(rows) - confirm
            check = draw_rows(list(validation[name]), settings.check_rows, seed)
        else:
            check = mixed[search + confirm :][: settings.check_rows]
        groups[name] = Group(
            search=_first(mixed[:search], settings.rows, settings),
            confirm=_first(mixed[search : search + confirm], settings.confirm_rows, settings),
            check=tuple(check),
            fit=tuple(row for row in mixed if row not in set(check))[:prompts],
        )
    return groups


def _first(mixed: Sequence[Example], rows: int, settings: SearchSettings) -> tuple[Example, ...]:
    """So many rows, and more as long as their answers have too few tokens."""
    left = settings.answer_tokens * rows / settings.rows
    for number, row in enumerate(mixed):
        if number >= rows and left <= 0:
            return tuple(mixed[:number])
        left -= len(row.answer)
    return tuple(mixed)


def are_named(kinds: Mapping[str, Sequence[Example]], settings: SearchSettings) -> bool:
    """Whether the sources that rows name are the groups, and none have to be found."""
    return settings.groups is None and len(kinds) > 1


def check_groups(train: Mapping[str, Sequence[Example]]) -> None:
    """Refuse groups that cannot be parted.

    Raises:
        DataError: A group has too few rows, or there are too many groups.
    """
    if len(train) > MOST_GROUPS:
        raise DataError(
            f"the rows name {len(train)} sources, and each is a group: expected {MOST_GROUPS} at "
            "most; name fewer, or set search.groups"
        )
    few = next((name for name, rows in sorted(train.items()) if len(rows) < LEAST_ROWS), None)
    if few is not None:
        raise DataError(
            f"{len(train[few])} different prompts of {shown(few)} that are not in the check: "
            f"expected {LEAST_ROWS} at least; add rows of it, or leave it out"
        )


def check_found(found: int, settings: SearchSettings, *, prompts: int) -> None:
    """Refuse fewer groups than were asked for.

    Args:
        found: Groups that the prompts make.
        settings: They may name how many groups there are to be.
        prompts: How many prompts were looked at.

    Raises:
        RecipeError: There are fewer.
    """
    if prompts >= LEAST_ROWS and found < (settings.groups or 1):  # `check_groups` refuses fewer
        raise RecipeError(
            f"search.groups must be at most {found}, as {prompts} different prompts make no more "
            f"groups of {LEAST_ROWS} or more, got {settings.groups}: ask for fewer, or add rows"
        )


def apart(
    train: Sequence[Example], validation: Sequence[Example]
) -> tuple[list[Example], list[Example]]:
    """Each prompt once; one that is in both is for the check alone.

    Raises:
        DataError: The rows have a source whose name a table gives to something else.
    """
    reserved = next((row.source for row in (*train, *validation) if row.source in RESERVED), None)
    if reserved is not None:
        raise DataError(
            f"a row's source is called {shown(reserved)}, which is the name of something else in "
            "the table: expected another name"
        )
    check = {row.prompt: row for row in reversed(validation)}
    search = {row.prompt: row for row in reversed(train) if row.prompt not in check}
    return list(search.values())[::-1], list(check.values())[::-1]


@dataclass(frozen=True, slots=True)
class Clusters:
    """Groups among what the router sees.

    Attributes:
        standard: Standardises summaries.
        centres: The middle of each group, standardised.
    """

    standard: Standard
    centres: Float[Tensor, "groups summary"]

    @classmethod
    def of(cls, summaries: Float[Tensor, "prompts summary"], most: int, seed: int) -> "Clusters":
        """Groups, as many as may be, of `LEAST_ROWS` prompts or more each.

        Args:
            summaries: What the router sees of each prompt.
            most: How many groups there may be.
            seed: Fixes where they begin.
        """
        standard = Standard.of(summaries)
        points = standard(summaries)
        for number in range(max(1, min(most, len(points) // LEAST_ROWS)), 1, -1):
            found = cls(standard, _centres(points, number, seed))
            if int(torch.bincount(found(summaries), minlength=number).min()) >= LEAST_ROWS:
                return found
        return cls(standard, points.mean(0, keepdim=True))

    def parted(
        self, rows: Sequence[Example], summaries: Float[Tensor, "prompts summary"]
    ) -> dict[str, list[Example]]:
        """Rows by the name of their group.

        Args:
            rows: Prompts and answers.
            summaries: What the router sees of each.
        """
        found: dict[str, list[Example]] = {}
        for row, group in zip(rows, self(summaries).tolist(), strict=True):
            found.setdefault(f"group {group + 1}", []).append(row)
        return found

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
