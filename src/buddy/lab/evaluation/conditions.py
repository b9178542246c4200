"""What is compared in one run: every policy at every budget, checked before anything runs."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

import torch

from buddy.budget.read import AUTO, split_phases
from buddy.budget.source import BudgetSource, ConstantBudget, PhasedBudget
from buddy.depth.policy import BatchSize, DepthPolicy, Observation, Policy
from buddy.depth.prior import OnProgress
from buddy.depth.select import select_blocks
from buddy.errors import BudgetError, PolicyError
from buddy.generation.budgets import read_prefill_budget
from buddy.model import BuddyForCausalLM
from buddy.policies.registry import build_policy, split_label
from buddy.routing.ledger import LedgerBudget

_LABEL_WIDTH: Final = 30
"""A longer list of blocks is a label by its first ones alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """One policy at one budget."""

    spec: str
    """As `--policy` takes it."""
    label: str
    """Short name, for tables and plots."""
    policy: Policy
    """Who chooses the blocks."""
    blocks: int
    """How many run; under `auto` the most that may, under a mean those of the prompt's tokens."""
    is_auto: bool = False
    """The Budget Predictor chooses how many, for each prompt."""
    prefill_blocks: int | None = None
    """How many the prompt's tokens run, where it is another number than the answer's."""
    mean: LedgerBudget | None = None
    """What spends a mean over the answer's tokens, in the place of one number for each."""

    @property
    def key(self) -> str:
        """Tells samples apart in a log; those of one fixed set of blocks are shared.

        What ran is named, not the file that said so: that may hold another order by now.
        """
        depths: Sequence[int]
        if self.is_auto:
            depths = range(self.policy.num_pinned, self.policy.num_blocks + 1)
        else:
            levels = [self.blocks] if self.mean is None else self.mean.ledger.config.levels
            depths = list(dict.fromkeys([self.prefill_blocks or self.blocks, *levels]))
        fixed = self._fixed(depths)
        if fixed is None:
            return f"{self.spec}@{self.depth}"
        named = "+".join(",".join(map(str, blocks)) for blocks in fixed)
        if self.is_auto or self.mean is not None:
            return f"{self.depth}:{hashlib.sha256(named.encode()).hexdigest()[:24]}"
        return f"blocks:{named}"

    def fixed_blocks(self) -> tuple[int, ...] | None:
        """The blocks that run whatever the input; None where the input decides, or the token."""
        if self.is_auto or self.mean is not None or self.prefill_blocks is not None:
            return None
        fixed = self._fixed([self.blocks])
        return None if fixed is None else fixed[0]

    def _fixed(self, depths: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
        """At each of some depths, the blocks that run whatever the input."""
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
        levels = () if self.mean is None else self.mean.ledger.config.levels
        depths = (self.blocks, self.prefill_blocks or self.blocks, *levels)
        self.policy.prepare_for(depths, on_progress)

    @property
    def depth(self) -> str:
        """The budget in a few characters."""
        if self.is_auto:
            return AUTO
        own = str(self.blocks) if self.mean is None else f"mean {self.mean.mean}"
        return own if self.prefill_blocks is None else f"{self.prefill_blocks}+{own}"

    @property
    def source(self) -> BudgetSource | None:
        """Who says how many blocks a token runs; None where the predictor chooses."""
        if self.is_auto:
            return None
        own = self.mean or ConstantBudget(self.blocks)
        return own if self.prefill_blocks is None else PhasedBudget(self.prefill_blocks, own)

    def budgets(self, prompt_tokens: int, others: Sequence[int]) -> tuple[int, ...]:
        """Blocks of the tokens of a sequence: one number for all, or one for each.

        Args:
            prompt_tokens: How many begin it.
            others: The ids of those after the prompt.
        """
        if self.prefill_blocks is None and self.mean is None:
            return (self.blocks,)
        own = (self.blocks,) * len(others) if self.mean is None else self.mean.levels(others)
        return ((self.prefill_blocks or self.blocks,) * prompt_tokens) + tuple(own)

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
        if self.prefill_blocks is not None:
            fields["prefill_blocks"] = self.prefill_blocks
        if self.mean is not None:
            fields["budget"] = f"mean:{float(self.mean.mean / self.policy.num_blocks):g}"
        return {**fields, "budget": AUTO} if self.is_auto else fields

    @property
    def is_free(self) -> bool:
        """Whether no budget has fixed how many blocks run: the predictor says, or each token."""
        return self.is_auto or self.mean is not None or self.policy.is_online

    def spent(self, mean: float) -> dict[str, Any]:
        """The mean depth in the place of `blocks`, where no budget has fixed it; else nothing."""
        return self.ran(mean if self.is_free else None)

    def ran(self, mean: float | None) -> dict[str, Any]:
        """A mean depth that was counted, in the place of `blocks`; nothing where none was."""
        return {} if mean is None else {"blocks": round(mean), "mean_blocks": mean}


def plan_conditions(
    model: BuddyForCausalLM,
    policies: Sequence[str] = (),
    budgets: Sequence[str] = ("1.0",),
    *,
    auto: bool = False,
    means: bool = False,
) -> list[Condition]:
    """Every policy at every budget; full depth once, as it is the same under all.

    Args:
        model: Whose blocks they choose.
        policies: `SPEC` or `LABEL=SPEC`, as in `sleb=static:12,11`; the model's own if none.
        budgets: As a caller writes them; `prefill:1.0,decode:0.5` gives prompts one of their own,
            and `mean:0.7` is spent over the tokens after the prompt.
        auto: Whether `auto` may be among them: the measurement must be one of prompts.
        means: Whether means may be: it must be one of whole answers, and count what tokens ran.

    Raises:
        BudgetError: A budget cannot be read, or a policy cannot spend it.
        PolicyError: A policy cannot serve this model, or two labels are equal.
    """
    wanted = [_split(policy) for policy in policies]
    repeated = sorted({label for label, _ in wanted if [one for one, _ in wanted].count(label) > 1})
    if repeated:
        raise PolicyError(
            f"policies share the label {', '.join(repeated)}: name them, as in "
            "--policy mine=static:12,11"
        )
    made = [(label, spec, build_policy(spec, model.resources)) for label, spec in wanted]
    if not made:
        label, spec = _split(model.policy_spec or model.policy.name)
        made = [(label, spec, model.policy)]
    read = model.read_budgets if auto else model.resolve_budgets
    depths = [_read_depth(one, model, read) for one in budgets]
    if not means and any(mean is not None for *_, mean in depths):
        raise BudgetError(
            "a mean is spent over the tokens of an answer: measure it by buddy eval answers or "
            "buddy eval rouge, and name another budget here"
        )
    different = {(prefill, blocks, mean and mean.mean): mean for prefill, blocks, mean in depths}
    conditions = []
    for (prefill, blocks, _), mean in different.items():
        if blocks is None:
            conditions += [_auto(model, label, spec, policy) for label, spec, policy in made]
            continue
        online = [one for one in made if one[2].is_online]
        if online:
            if blocks != model.num_blocks or prefill is not None or mean is not None:
                raise BudgetError(
                    f"policy {online[0][1]!r} decides while it runs and keeps no budget: measure "
                    "it at -b 1.0, in a run of its own"
                )
            conditions += [
                Condition(spec=spec, label=label, policy=policy, blocks=blocks)
                for label, spec, policy in made
            ]
            continue
        if blocks == model.num_blocks and prefill is None and mean is None:
            full = build_policy("full", model.resources)
            conditions.append(Condition(spec="full", label="full", policy=full, blocks=blocks))
            continue
        for label, spec, policy in made:
            levels = () if mean is None else mean.ledger.config.levels
            policy.check_spendable({blocks, prefill or blocks, *levels})
            shown = label if mean is None else f"{label} mean {float(mean.mean):g}"
            conditions.append(
                Condition(
                    spec=spec,
                    label=shown if prefill is None else f"{shown}, prompt at {prefill}",
                    policy=policy,
                    blocks=blocks,
                    prefill_blocks=prefill,
                    mean=mean,
                )
            )
    return conditions


def _read_depth(
    text: str, model: BuddyForCausalLM, read: Callable[[str, int], tuple[int | None, ...]]
) -> tuple[int | None, int | None, LedgerBudget | None]:
    """Blocks of the prompt's tokens, None where they are the answer's; and of the answer's.

    Under a mean the answer's are those of a prompt that has no number of its own.
    """
    prompt, answer = split_phases(text)
    mean = model.ledger_budget(answer)
    blocks = read(answer, 1)[0] if mean is None else mean.prompt
    if prompt is None:
        return None, blocks, mean
    if blocks is None:
        raise BudgetError(
            f"budget {text!r}: auto is chosen for prompt and answer together; name both as numbers"
        )
    prefill = read_prefill_budget(prompt, model.num_blocks)
    return (None if prefill == blocks else prefill), blocks, mean


def _auto(model: BuddyForCausalLM, label: str, spec: str, policy: Policy) -> Condition:
    assert model.predictor is not None
    if policy.is_online:
        raise BudgetError(
            f"policy {spec!r} decides while it runs and keeps no budget: measure it at -b 1.0, in "
            "a run of its own"
        )
    policy.check_spendable((model.predictor.lowest,))
    return Condition(
        spec=spec, label=f"{label} auto", policy=policy, blocks=model.num_blocks, is_auto=True
    )


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
