"""What a request is drafted from, as it names it or as whoever started the server did."""

from dataclasses import replace

from buddy.budget.resolved import ResolvedBudget
from buddy.errors import BudgetError
from buddy.generation.drafts import Drafts, read_drafts
from buddy.serving.client import EngineFacts
from buddy.serving.http.bodies import DraftsField
from buddy.serving.http.refusals import Refusal, refusal_of


def drafts_of(
    named: DraftsField | None, default: Drafts, budget: ResolvedBudget, facts: EngineFacts
) -> Drafts:
    """The drafts of a request.

    Args:
        named: Its field; None = it has the server's default, without a budget that cannot draft
            for it.
        default: That of the server.
        budget: Of the request.
        facts: Of the engine.

    Raises:
        Refusal: What it names cannot be read, or cannot draft for it.
    """
    try:
        drafts = default if named is None else read_drafts(named)
        why_no_budget = _why_no_budget(drafts, budget, facts)
    except BudgetError as error:
        raise refusal_of(error, "drafts") from error
    if drafts and facts.why_no_drafts is not None:
        raise Refusal(400, facts.why_no_drafts, param="drafts", code="unsupported")
    if why_no_budget is None:
        return drafts
    if named is None:
        return replace(drafts, budget=None)
    raise Refusal(400, why_no_budget, param="drafts", code="invalid_budget")


def check_default(drafts: Drafts, num_blocks: int, least_blocks: int) -> None:
    """Refuse a budget that drafts for no request whatever.

    Raises:
        BudgetError: It cannot be spent, or is full depth.
    """
    if drafts.budget is None:
        return
    why = _why_wrong(drafts.budget.blocks(num_blocks), num_blocks, num_blocks, least_blocks)
    if why is not None:
        raise BudgetError(why)


def _why_no_budget(drafts: Drafts, budget: ResolvedBudget, facts: EngineFacts) -> str | None:
    """Why its budget cannot draft for a request; None where it can, or there is none."""
    if drafts.budget is None:
        return None
    if budget.mean is not None or budget.own is not None:
        return (
            "a budget drafts for an answer whose tokens all run as many blocks, got one under a "
            'mean: name such a budget, or drafts: "ngram"'
        )
    blocks = drafts.budget.blocks(facts.num_blocks)
    most = max(budget.most, budget.think or 0)
    return _why_wrong(blocks, most, facts.num_blocks, facts.least_blocks)


def _why_wrong(blocks: int, most: int, num_blocks: int, least: int) -> str | None:
    if least <= blocks < most:
        return None
    return (
        f"a budget that drafts must be at least {least} and below the answer's {most} of "
        f"{num_blocks} blocks, got {blocks}: name another one"
    )
