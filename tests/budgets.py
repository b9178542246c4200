"""Budgets in blocks, as tests write them."""

from buddy.budget.resolved import ResolvedBudget


def fixed(decode, prefill=None):
    """A contract for each token."""
    prefill = None if prefill == decode else prefill
    return ResolvedBudget(kind="fixed", least=decode, most=decode, prefill=prefill)


def on_average(prefill, decode, mean):
    """A contract for the whole answer."""
    made = ResolvedBudget(kind="mean", least=decode, most=decode, mean=mean)
    if prefill != made.prompt:
        made = ResolvedBudget(kind="mean", least=decode, most=decode, mean=mean, prefill=prefill)
    return made


def auto(least, most):
    """The predictor's choice."""
    return ResolvedBudget(kind="auto", least=least, most=most)


def deadline(ms_per_token, least, most):
    """As deep as time allows."""
    return ResolvedBudget(kind="deadline", least=least, most=most, ms_per_token=ms_per_token)


def default(least, most):
    """Nothing was named."""
    return ResolvedBudget(kind="default", least=least, most=most)
