"""The paper's four depths, as shares: an eighth of the blocks removed, a quarter, and so on."""

from typing import Final

from buddy.lab.paper.published.read import Row

BUDGETS: Final = ("0.875", "0.75", "0.625", "0.5")
QUICK_BUDGETS: Final = ("0.75", "0.5")


def budgets_of(full: bool, quick: tuple[str, ...] = QUICK_BUDGETS) -> tuple[str, ...]:
    """All four for the paper's settings, else some."""
    return BUDGETS if full else quick


def flags(budgets: tuple[str, ...]) -> list[str]:
    """Budgets as commands take them; full depth comes first."""
    return [part for budget in ("1.0", *budgets) for part in ("-b", budget)]


def blocks_of(budget: str, num_blocks: int) -> int:
    """Blocks that run."""
    from buddy.budget.blocks import Budget

    return Budget.from_ratio(float(budget), num_blocks).blocks


def budget_at(blocks: int, num_blocks: int) -> str | None:
    """The paper's budget that comes to so many blocks; of several the largest."""
    return next((budget for budget in BUDGETS if blocks_of(budget, num_blocks) == blocks), None)


def level(row: Row, rows: list[Row]) -> str | None:
    """The budget that a row of the paper stands for; None for the dense model.

    Args:
        row: With `removed`, blocks.
        rows: Of the same table; of the same model where it has several.
    """
    depths = sorted({int(other["removed"]) for other in rows if int(other["removed"])})
    return dict(zip(depths, BUDGETS, strict=False)).get(int(row["removed"]))
