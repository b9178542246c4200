"""How often each block ran: what block heat maps are made from."""

from collections.abc import Mapping, Sequence
from typing import Any

from buddy.lab.evaluation.conditions import Condition


def execution_rates(
    condition: Condition,
    plans: Mapping[str, Sequence[tuple[int, ...]]],
    depths: Mapping[str, float | None] | None = None,
    *,
    of_prompts: bool = False,
) -> list[dict[str, Any]]:
    """The share of inputs whose plan ran each block, by task, and how many plans differ.

    Args:
        condition: Whose plans they are.
        plans: By task, the blocks that ran for each input.
        depths: By task, the mean depth where it was counted by token.
        of_prompts: Whether they are the prompts' plans, whatever depth the answers have.
    """
    is_deeper = of_prompts and condition.budget.prefill is not None
    entries = []
    for task, ran in plans.items():
        rates = [
            sum(block in blocks for blocks in ran) / len(ran)
            for block in range(condition.policy.num_blocks)
        ]
        entries.append(
            {
                **condition.describe(),
                **({"blocks": condition.budget.prefill} if is_deeper else {}),
                **condition.spent(sum(rates)),
                **condition.ran((depths or {}).get(task)),
                "task": task,
                "rates": rates,
                "inputs": len(ran),
                "distinct_plans": len(set(ran)),
            }
        )
    return entries
