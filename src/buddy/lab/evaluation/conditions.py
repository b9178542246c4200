"""What is compared in one run: every policy at every budget, checked before anything runs."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

import torch

from buddy.budget.request import BudgetLike, BudgetRequest, read_budget
from buddy.budget.resolved import ResolvedBudget
from buddy.budget.source import BudgetSource, Progress, blocks_of_lanes
from buddy.depth.policy import BatchSize, DepthPolicy, Observation, Policy
from buddy.depth.prior import OnProgress
from buddy.depth.select import select_blocks
from buddy.errors import BudgetError, PolicyError
from buddy.model import BuddyForCausalLM
from buddy.policies.registry import build_policy, split_label
from buddy.routing.ledger import Ledger

_LABEL_WIDTH: Final = 30
"""A longer list of blocks is a label by its first ones alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """One policy at one budget."""

    spec: str
    """The policy, as `--policy` takes it."""
    label: str
    """Short name, for tables and plots."""
    policy: Policy
    """Who chooses the blocks."""
    budget: ResolvedBudget
    """How many run."""
    ledger: Ledger | None = None
    """The model's, which spends a mean."""

    @property
    def blocks(self) -> int:
        """How many run; the most that may under `auto`, the prompt's under a mean."""
        return self.budget.nominal

    @property
    def depth(self) -> str:
        """The budget in a few characters."""
        return self.budget.label

    @property
    def source(self) -> BudgetSource | None:
        """Who says how many blocks a token runs; None where the predictor chooses."""
        return self.budget.source(self.ledger)

    @property
    def key(self) -> str:
        """Tells samples apart in a log; those of one fixed set of blocks are shared.

        What ran is named, not the file that said so: that may hold another order by now.
        """
        depths: Sequence[int] = self.budget.depths(self.ledger)
        depth = self.depth if self.budget.own is None else repr(self.budget.own)
        if self.source is None:
            depths = range(self.policy.num_pinned, self.policy.num_blocks + 1)
        fixed = self._fixed(depths)
        if fixed is None:
            return f"{self.spec}@{depth}"
        named = "+".join(",".join(map(str, blocks)) for blocks in fixed)
        if self.budget.blocks is None:
            return f"{depth}:{hashlib.sha256(named.encode()).hexdigest()[:24]}"
        return f"blocks:{named}"

    def fixed_blocks(self) -> tuple[int, ...] | None:
        """The blocks that run whatever the input; None where the input decides, or the token."""
        if self.budget.blocks is None or self.budget.prefill is not None:
            return None
        fixed = self._fixed([self.blocks])
        return None if fixed is None else fixed[0]

    def _fixed(self, depths: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
        """The blocks that run at each of some depths, whatever the input."""
        policy = self.policy
        if not isinstance(policy, DepthPolicy) or policy.context_layer > 0:
            return None
        nothing = torch.zeros(len(depths), 1, dtype=torch.long)
        state = policy.observe(None, Observation(nothing, nothing.bool()))
        if not isinstance(state, BatchSize):  # it remembers something of the input
            return None
        budgets = torch.tensor(depths)
        scores = policy.scores(state, budgets)
        return select_blocks(scores, budgets, pinned=policy.pinned).executed_sets

    def prepare(self, on_progress: OnProgress) -> None:
        """Have the policy measure now what it will need at this budget."""
        depths = self.budget.depths(self.ledger) if self.budget.is_contract else (self.blocks,)
        self.policy.prepare_for(depths, on_progress)

    def budgets(self, prompt_tokens: int, others: Sequence[int]) -> tuple[int, ...]:
        """Blocks of the tokens of a sequence: one number for all, or one for each.

        Args:
            prompt_tokens: How many begin it.
            others: The ids of those after the prompt.
        """
        source = self.source
        if source is None or (self.budget.blocks is not None and self.budget.prefill is None):
            return (self.blocks,)
        answer = Progress(
            is_prompt=False,
            new_tokens=len(others),
            num_blocks=self.policy.num_blocks,
            token_ids=tuple(others),
        )
        blocks = blocks_of_lanes(source, answer)
        each = blocks if len(blocks) == len(others) else blocks * len(others)
        return (self.budget.prompt,) * prompt_tokens + each

    def point(self, task: str, metric: str, value: float, **rest: Any) -> dict[str, Any]:
        """One figure of a RunRecord, as plots read it."""
        return {**self.describe(), "task": task, "metric": metric, "value": value, **rest}

    def describe(self) -> dict[str, Any]:
        """The fields that every figure of this condition carries."""
        fields = {
            "policy": self.spec,
            "label": self.label,
            "blocks": self.blocks,
            "num_blocks": self.policy.num_blocks,
        }
        if self.budget.prefill is not None:
            fields["prefill_blocks"] = self.budget.prefill
        written = self.budget.written(self.policy.num_blocks)
        return fields if written is None else {**fields, "budget": written}

    @property
    def is_free(self) -> bool:
        """Whether no budget has fixed how many blocks run: the predictor says, or each token."""
        return self.budget.blocks is None or self.policy.is_online

    def spent(self, mean: float) -> dict[str, Any]:
        """The mean depth in the place of `blocks`, where no budget has fixed it; else nothing."""
        return self.ran(mean if self.is_free else None)

    def ran(self, mean: float | None) -> dict[str, Any]:
        """A mean depth that was counted, in the place of `blocks`; nothing where none was."""
        return {} if mean is None else {"blocks": round(mean), "mean_blocks": mean}


def plan_conditions(
    model: BuddyForCausalLM,
    policies: Sequence[str] = (),
    budgets: Sequence[BudgetLike] = ("1.0",),
    *,
    auto: bool = False,
    means: bool = False,
    thinking: bool = False,
) -> list[Condition]:
    """Every policy at every budget; full depth once, as it is the same under all.

    Args:
        model: Whose blocks they choose.
        policies: `SPEC` or `LABEL=SPEC`, as in `sleb=static:12,11`; the model's own if none.
        budgets: As a caller writes them; `prefill:1.0,decode:0.5` gives prompts one of their own,
            and `mean:0.7` is spent over the tokens after the prompt.
        auto: Whether `auto` may be among them: the measurement must be one of prompts.
        means: Whether means may be: it must be one of whole answers, and count what tokens ran.
        thinking: Whether budgets for thinking may be: answers must be generated.

    Raises:
        BudgetError: A budget cannot be read, or a policy cannot spend it.
        PolicyError: A policy cannot serve this model, or two labels are equal.
    """
    wanted = [_split(policy) for policy in policies]
    labels = [label for label, _ in wanted]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        raise PolicyError(
            f"policies share the label {', '.join(repeated)}: name them, as in "
            "--policy mine=static:12,11"
        )
    built = [(label, spec, build_policy(spec, model.resources)) for label, spec in wanted]
    if not built:
        label, spec = _split(model.policy_spec or model.policy.name)
        built = [(label, spec, model.policy)]
    different = dict.fromkeys(
        _resolve(read_budget(budget), model, auto=auto, means=means, thinking=thinking)
        for budget in budgets
    )
    return [condition for budget in different for condition in _conditions_at(budget, model, built)]


def _resolve(
    request: BudgetRequest, model: BuddyForCausalLM, *, auto: bool, means: bool, thinking: bool
) -> ResolvedBudget:
    """A budget in blocks, if it can be measured."""
    budget = request.resolve(model.limits)
    if budget.is_auto and not auto:
        raise BudgetError(
            "budget 'auto' is chosen for each prompt, and one for all is needed here: "
            'name a budget such as 0.75 or "18 blocks"'
        )
    if budget.think is not None and not thinking:
        raise BudgetError(
            "a budget for think is spent while a model writes, and this measures what is given: "
            "name one number or prompt:1.0,answer:0.5 here, and measure thinking where answers "
            "are generated, as by buddy eval gsm8k or buddy eval rouge"
        )
    if budget.mean is not None and not means:
        raise BudgetError(
            "a mean is spent over the tokens of an answer: measure it by buddy eval answers or "
            "buddy eval rouge, and name another budget here"
        )
    return budget


def _conditions_at(
    budget: ResolvedBudget, model: BuddyForCausalLM, policies: Sequence[tuple[str, str, Policy]]
) -> list[Condition]:
    """Each policy at one budget; full depth once."""
    is_full = budget.blocks == model.num_blocks and budget.prefill is None
    online = next((spec for _, spec, policy in policies if policy.is_online), None)
    if online is not None and not is_full:
        raise BudgetError(
            f"policy {online!r} decides while it runs and keeps no budget: measure it at -b 1.0, "
            "in a run of its own"
        )
    if online is None and is_full:
        policies = [("full", "full", build_policy("full", model.resources))]
    conditions = []
    for label, spec, policy in policies:
        condition = Condition(
            spec=spec,
            label=label + budget.title,
            policy=policy,
            budget=budget,
            ledger=model.ledger,
        )
        if online is None:
            depths = budget.depths(model.ledger)
            if model.predictor is not None and budget.is_auto:
                depths = (model.predictor.lowest,)
            policy.check_spendable(depths)
        conditions.append(condition)
    return conditions


def _split(policy: str) -> tuple[str, str]:
    """The label and the spec of `LABEL=SPEC`; a spec alone goes by its record's name or start."""
    label, spec = split_label(policy)
    if label is not None:
        return label, spec
    _, _, argument = policy.partition(":")
    if argument.endswith(".json"):
        return PurePath(argument).stem, policy
    first, comma, _ = policy[:_LABEL_WIDTH].rpartition(",")
    return (f"{first},…" if comma and len(policy) > _LABEL_WIDTH else policy), policy
