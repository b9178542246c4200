"""What cannot be drafted for is refused by name."""

from collections.abc import Sequence
from typing import Any

from buddy.budget.source import BudgetSource, ConstantBudget, PhasedBudget
from buddy.depth.policy import Policy
from buddy.engine.tokenwise import why_no_drafts
from buddy.errors import PolicyError
from buddy.generation.drafts import Drafts
from buddy.generation.loop import Stop
from buddy.generation.next_token import FiniteLogits


def steady_depth(source: BudgetSource) -> int | None:
    """Blocks that each token of an answer runs; None where that may differ."""
    answer = source.answer if isinstance(source, PhasedBudget) else source
    return answer.each if isinstance(answer, ConstantBudget) else None


def check_drafts(
    drafts: Drafts, policy: Policy, sources: Sequence[BudgetSource], num_blocks: int
) -> int | None:
    """Blocks that draft for these rows; None where n-grams do alone.

    Raises:
        BudgetError: The policy cannot run so few.
        PolicyError: The policy plans no drafts; or a low budget is to draft for a row whose budget
            it saves nothing of.
    """
    if (reason := why_no_drafts(policy)) is not None:
        raise PolicyError(reason)
    if drafts.budget is None:
        return None
    blocks = drafts.budget.blocks(num_blocks)
    policy.check_spendable([blocks])
    for row, source in enumerate(sources):
        whose = f"row {row}'s" if len(sources) > 1 else "the answer's"
        depth = steady_depth(source)
        if depth is None:
            raise PolicyError(
                f"a budget drafts for an answer whose tokens all run as many blocks, and {whose} "
                'do not: name such a budget, or use drafts="ngram"'
            )
        if blocks >= depth:
            raise PolicyError(
                f"a budget that drafts must be below {whose} {depth} of {num_blocks} blocks, got "
                f"{blocks}"
            )
    return blocks


def check_drafted_rows(
    config: Any, processors: Sequence[Any], stop: Stop, streamer: Any, inputs: dict[str, Any]
) -> None:
    """Refuse what would ask all rows of a batch at one place of their texts.

    Args:
        config: The options.
        processors: What changes logits.
        stop: Where rows end.
        streamer: Told of each column; None = nobody.
        inputs: Those of a step.

    Raises:
        PolicyError: There is such an option.
    """
    others = [rule for rule in processors if not isinstance(rule, FiniteLogits)]
    rules = (*others, *stop.others)
    names = [getattr(rule, "option", type(rule).__name__) for rule in rules]
    wrong = {
        "do_sample": config.do_sample,
        "streamer": streamer is not None,
        "cache": inputs["cache"]._is_user_defined,
        'batch_route="shared"': inputs["batch_route"] == "shared",
        ", ".join(names): bool(names),
    }
    found = [name for name, is_given in wrong.items() if is_given]
    if found:
        raise PolicyError(
            "rows that are drafted for go on at different speeds, so drafts for a batch are greedy "
            f"decoding alone, got {', '.join(found)}: leave it out, or pass one row at a time"
        )
