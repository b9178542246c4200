"""How well answers are predicted: their cross-entropy, the route chosen from the prompt alone.

Do routes depend on the input to its use? Then an answer must cost more under the plan of another
input at the same budget. That is measured too, input by input.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from buddy.data.examples import Example
from buddy.depth.policy import BatchSize, BlockScores, DepthPolicy, Policy, RowBudgets
from buddy.engine.feed import Feed
from buddy.engine.run import run_once
from buddy.errors import DataError
from buddy.lab.evaluation.against import Against
from buddy.lab.evaluation.answers.answer_points import (
    ALL,
    Answered,
    answer_points,
    difference_points,
    exchange_points,
    mean_depth,
)
from buddy.lab.evaluation.conditions import Condition
from buddy.lab.evaluation.execution import execution_rates
from buddy.lab.evaluation.samples import SampleLog, measure_missing
from buddy.lab.evaluation.tasks.scoring import token_logprobs
from buddy.model import BuddyForCausalLM

Plan = tuple[int, ...]
"""The blocks that run, ascending."""
WITHIN: Final = ("all", "source")
"""Whose plans are exchanged: those of any inputs, or of inputs from the same source."""


class GivenPlans(DepthPolicy):
    """Runs the plans it is given, one a row, whatever the input."""

    name = "given"
    pinned: Sequence[int] = ()

    def __init__(self, plans: Sequence[Plan], num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._wanted = torch.zeros(len(plans), num_blocks)
        for row, plan in enumerate(plans):
            self._wanted[row, list(plan)] = 1.0

    def scores(self, state: BatchSize, blocks: RowBudgets) -> BlockScores:
        """One where the block is to run."""
        return self._wanted.to(state.device)

    def describe(self) -> str:
        """The policy as a summary line shows it."""
        return "given plans"


@torch.inference_mode()
def losses_under(
    model: BuddyForCausalLM,
    policy: Policy,
    budgets: Callable[[int, Sequence[int]], tuple[int, ...]],
    examples: Sequence[Example],
) -> list[tuple[float, Plan, int]]:
    """Each example's loss of its answer, its plan, and the blocks that all its tokens ran.

    The loss is the answer's summed negative log-likelihood given the prompt.

    Args:
        model: Runs the blocks.
        policy: Chooses them; it sees the prompts alone.
        budgets: From the number of tokens of a prompt, and the ids of those that are fed after it,
            to their budgets.
        examples: A batch; those of like length waste least.
    """
    fed = [(*example.prompt, *example.answer[:-1]) for example in examples]
    is_prompt = [n < len(row.prompt) for row in examples for n in range(row.num_tokens - 1)]
    device = model.device
    feed = Feed(
        token_ids=torch.tensor([token for tokens in fed for token in tokens], device=device),
        counts=tuple(map(len, fed)),
        router_sees=torch.tensor(is_prompt, device=device),
    )
    asked = [budgets(len(example.prompt), example.answer[:-1]) for example in examples]
    out = run_once(model.backbone, policy, feed, asked)
    # The residual at a token predicts the one after it.
    ends = [int(last) + 1 for last in out.lanes.last]
    before = [
        lane
        for end, example in zip(ends, examples, strict=True)
        for lane in range(end - len(example.answer), end)
    ]
    targets = torch.tensor([t for example in examples for t in example.answer], device=device)
    logprobs, _ = token_logprobs(model, out.hidden[before], targets)
    parts = torch.split(-logprobs.cpu().double(), [len(example.answer) for example in examples])
    plans = out.last_plan.executed_sets
    ran = [int(part.sum()) for part in torch.split(out.executed, list(feed.counts))]
    return [
        (float(part.sum()), plan, executed)
        for part, plan, executed in zip(parts, plans, ran, strict=True)
    ]


def others(sources: Sequence[str], within: str, seed: int) -> dict[int, int]:
    """Another input for each input, at random; each is chosen once.

    Args:
        sources: Of each input.
        within: One of `WITHIN`.
        seed: Of the draw.

    Returns:
        By input, the other; an input that is alone in its source has none.
    """
    groups: dict[str, list[int]] = {}
    for place, source in enumerate(sources):
        groups.setdefault(ALL if within == "all" else source, []).append(place)
    others_by_place: dict[int, int] = {}
    for name, members in groups.items():
        random.Random(f"{seed} {name}").shuffle(members)
        if len(members) > 1:
            # Each takes after the next in a random ring: at random, and never itself.
            others_by_place |= dict(zip(members, [*members[1:], members[0]], strict=True))
    return others_by_place


def run_answers(
    model: BuddyForCausalLM,
    conditions: Sequence[Condition],
    examples: Sequence[Example],
    *,
    batch: int = 16,
    shuffle_seed: int | None = None,
    log: SampleLog | None = None,
    against: Against | None = None,
    on_answers: Callable[[Condition, int], None] = lambda condition, answers: None,
) -> dict[str, Any]:
    """Answer losses of every condition over all examples.

    Args:
        model: Runs the blocks.
        conditions: One after another.
        examples: In any order.
        batch: Examples at a time.
        shuffle_seed: Also give each input the plan of another one; None to leave that out.
        log: Keeps each answer's loss, and gives back those it has.
        against: An earlier run on the same rows, to take differences from.
        on_answers: Told of answers done; under `rounds_of` plans each.

    Returns:
        `points` and `execution`, over all examples and by source; `exchanged`, what the plan of
        another input costs; and `against`, the difference from the earlier run.

    Raises:
        DataError: Plans are to be exchanged, and there is one example, or no plan that an input
            decides.
        ResultError: The earlier run is of other rows or budgets.
    """
    if shuffle_seed is not None and len(examples) < 2:
        raise DataError("plans can be exchanged between 2 examples or more, got 1")
    rounds = {rounds_of(condition, shuffle=True) for condition in conditions}
    if shuffle_seed is not None and rounds == {1}:
        raise DataError(
            "no plans can be exchanged: expected a policy and a budget under which the input "
            f"decides which blocks run, got {', '.join(_names(conditions))}; name such a one, as "
            "the policy routed of a trained model, or exchange no plans"
        )
    sources = [example.source for example in examples]
    bench = _Bench(model, examples, batch, log, on_answers)
    results: dict[str, Any] = {"points": [], "exchanged": [], "execution": [], "against": []}
    marks = list(map(row_mark, examples))
    # Before anything is measured.
    earlier = [
        [(before.about, before.rows(marks, Answered)) for before in against.beside(condition)]
        if against is not None
        else []
        for condition in conditions
    ]
    for condition, beside in zip(conditions, earlier, strict=True):
        own = bench.under_policy(condition)
        results["points"] += answer_points(condition, own)
        for about, theirs in beside:
            pairs = list(zip(own, theirs, strict=True))
            results["against"] += difference_points(condition, pairs, **about)
        by_task: dict[str, list[Answered]] = {ALL: own}
        for answer in own:
            by_task.setdefault(answer.task, []).append(answer)
        plans = {task: [answer.blocks for answer in mine] for task, mine in by_task.items()}
        depths = {task: mean_depth(condition, mine) for task, mine in by_task.items()}
        results["execution"] += execution_rates(condition, plans, depths)
        if shuffle_seed is None or rounds_of(condition, shuffle=True) == 1:
            continue
        for within in WITHIN:
            chosen = others(sources, within, shuffle_seed)
            given = bench.under_plans(condition, {i: own[j].blocks for i, j in chosen.items()})
            pairs = [(own[i], given[i]) for i in sorted(given)]
            results["exchanged"] += exchange_points(condition, pairs, within)
    return results


def rounds_of(condition: Condition, *, shuffle: bool) -> int:
    """How often each example is run.

    A fixed set of blocks leaves no plans to exchange, nor do tokens that have budgets of their own,
    or that decide while they run.
    """
    if condition.is_free or condition.budget.prefill is not None:
        return 1
    return 1 + len(WITHIN) if shuffle and condition.fixed_blocks() is None else 1


def _names(conditions: Sequence[Condition]) -> list[str]:
    return [f"{condition.label} at {condition.depth}" for condition in conditions]


def row_mark(example: Example) -> str:
    """Names a row by its content."""
    content = json.dumps([example.source, example.prompt, example.answer])
    return hashlib.sha256(content.encode()).hexdigest()[:24]


@dataclass(slots=True)
class _Bench:
    """Runs examples that have not been run, and remembers what came out."""

    model: BuddyForCausalLM
    examples: Sequence[Example]
    batch: int
    log: SampleLog | None
    on_answers: Callable[[Condition, int], None]
    _digests: list[str] = field(init=False)
    _known: dict[str, Answered] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._digests = list(map(row_mark, self.examples))

    def under_policy(self, condition: Condition) -> list[Answered]:
        """Every example, under the plan that the policy chooses."""
        keys = {i: f"{condition.key} {self._digests[i]}" for i in range(len(self.examples))}
        self._run(condition, keys, lambda rows: condition.policy)
        return [self._known[keys[i]] for i in range(len(self.examples))]

    def under_plans(self, condition: Condition, plans: dict[int, Plan]) -> dict[int, Answered]:
        """Some examples, under these plans."""
        keys = {}
        for i, plan in plans.items():
            own = f"{condition.key} {self._digests[i]}"
            # As the log names a fixed set of blocks: its losses are shared.
            given = f"blocks:{','.join(map(str, plan))} {self._digests[i]}"
            keys[i] = own if self._known[own].blocks == plan else given
        num_blocks = condition.policy.num_blocks
        self._run(condition, keys, lambda rows: GivenPlans([plans[i] for i in rows], num_blocks))
        return {i: self._known[key] for i, key in keys.items()}

    def _run(
        self,
        condition: Condition,
        keys: dict[int, str],
        policy_of: Callable[[Sequence[int]], Policy],
    ) -> None:
        """Know the answer of each example under its key."""

        def measure(places: Sequence[int]) -> list[Answered]:
            examples = [self.examples[i] for i in places]
            losses = losses_under(self.model, policy_of(places), condition.budgets, examples)
            return [self._answered(i, *loss) for i, loss in zip(places, losses, strict=True)]

        new = [(key, i) for i, key in keys.items() if key not in self._known]
        known = iter([len(keys) - len(new)])  # told along with those that were logged
        samples = measure_missing(
            new,
            Answered,
            self.log,
            batch=self.batch,
            length=lambda i: self.examples[i].num_tokens,
            measure=measure,
            on_samples=lambda new: self.on_answers(condition, len(new) + next(known, 0)),
        )
        for (key, i), sample in zip(new, samples, strict=True):
            self._known[key] = self._answered(i, sample.nll, sample.blocks, sample.executed)

    def _answered(self, i: int, nll: float, blocks: Plan, executed: int) -> Answered:
        example = self.examples[i]
        return Answered(
            nll, len(example.answer), blocks, example.source, example.num_tokens - 1, executed
        )
