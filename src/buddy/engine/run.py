"""One pass: new tokens of some sequences, from the embedding through the last block."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.budget.blocks import check_spendable
from buddy.budget.source import (
    ConstantBudget,
    Progress,
    blocks_of_lanes,
    reads_tokens,
)
from buddy.depth.plan import DepthPlan
from buddy.depth.policy import DepthPolicy, OnlinePolicy, Policy, is_online, settles
from buddy.engine.ahead import PlannedPrompt
from buddy.engine.executors.blocks import BlockRun
from buddy.engine.executors.protocol import GENERAL, Executor, Run
from buddy.engine.probe import HEAD, piece
from buddy.engine.state.cache import PassingKV
from buddy.engine.state.lanes import Lanes
from buddy.engine.state.sequence import Reroute, SequenceState
from buddy.engine.state.session import Session, SessionState
from buddy.engine.steer import Ahead, BatchRoute, Budgeted, Online, Steering, steer
from buddy.errors import BudgetError, PolicyError, PromptError


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """New tokens, those of a sequence side by side.

    Attributes:
        token_ids: By lane.
        counts: New tokens of each sequence, at least one.
        router_sees: Lanes that the route may see; None = all.
        prompts: Of each sequence, whether its tokens are of its prompt; None = where it has had
            no step yet.
    """

    token_ids: Int[Tensor, " lanes"]
    counts: tuple[int, ...]
    router_sees: Bool[Tensor, " lanes"] | None = None
    prompts: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        if min(self.counts, default=0) < 1 or sum(self.counts) != self.token_ids.shape[0]:
            raise PromptError(
                f"a feed has {len(self.token_ids)} tokens for sequences of {list(self.counts)}: "
                "expected at least one of each, and as many as the counts say in all"
            )

    @classmethod
    def of_batch(
        cls,
        token_ids: Int[Tensor, "batch tokens"],
        valid: Bool[Tensor, "batch tokens"] | None = None,
        router_sees: Bool[Tensor, "batch tokens"] | None = None,
    ) -> "Feed":
        """The tokens of a padded batch; a row of pads alone is left out.

        Args:
            token_ids: Pads on either side, or none.
            valid: False for pads; None = there are none.
            router_sees: Tokens that the route may see; None = all.
        """
        batch, tokens = token_ids.shape
        if valid is None or bool(valid.all()):
            sees = None if router_sees is None else router_sees.flatten()
            return cls(token_ids=token_ids.flatten(), counts=(tokens,) * batch, router_sees=sees)
        return cls(
            token_ids=token_ids[valid],
            counts=tuple(count for count in valid.sum(1).tolist() if count),
            router_sees=None if router_sees is None else router_sees[valid],
        )


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one pass returns, by lane.

    Attributes:
        lanes: New tokens, and where they stand.
        hidden: The residual after the last block.
        plan: What ran.
        executed: Blocks that ran, counted where they ran; on the host.
        logits: Where the pass made them.
        engine: Who ran it.
    """

    lanes: Lanes
    hidden: Float[Tensor, "lanes hidden"]
    plan: DepthPlan
    executed: Int[Tensor, " lanes"]
    logits: Float[Tensor, "lanes words"] | None = None
    engine: str = GENERAL

    @property
    def last_plan(self) -> DepthPlan:
        """What the last new token of each sequence ran, in the order of the sequences."""
        return self.plan.select(self.lanes.last)


def logits_of(
    backbone: Backbone,
    out: StepOutput,
    executor: Executor | None = None,
    *,
    hidden: Float[Tensor, "*shape hidden"] | None = None,
    words: int | None = None,
) -> Float[Tensor, "*shape words"]:
    """Logits of every lane, or of some residuals of a pass; made now where the pass made none.

    Args:
        backbone: Has the output projection.
        out: The pass.
        executor: Who may have run it.
        hidden: Of these alone; None = of every lane.
        words: As the pass was told; None = of every token id.
    """
    if hidden is None:
        if out.logits is not None:
            return out.logits[..., :words]
        hidden = out.hidden
    with piece(HEAD):
        made = None
        if executor is not None and out.engine == executor.name:
            made = executor.logits(hidden)
        return (backbone.logits(hidden) if made is None else made)[..., :words]


def check_context(held: Sequence[SequenceState], feed: Feed, backbone: Backbone) -> None:
    """Refuse new tokens that the model's context does not hold.

    Raises:
        PromptError: A sequence would be longer than the context, or the feed is of others.
    """
    if len(held) != len(feed.counts):
        raise PromptError(f"{len(feed.counts)} sequences are fed, and {len(held)} are named")
    longest = max(one.length + count for one, count in zip(held, feed.counts, strict=True))
    context = backbone.context
    if longest > context:
        raise PromptError(
            f"a sequence would have {longest} tokens, but the model's context holds {context}"
        )


def check_reroute(reroute: str | int) -> Reroute:
    """Refuse what is no re-routing rule.

    Raises:
        PolicyError: Neither "step" nor "prefill" nor a count of steps.
    """
    if reroute in ("step", "prefill") or (
        isinstance(reroute, int) and not isinstance(reroute, bool) and reroute >= 1
    ):
        return cast(Reroute, reroute)
    raise PolicyError(
        f'reroute must be "step", "prefill" or a number of steps of at least 1, got {reroute!r}'
    )


def run_step(
    backbone: Backbone,
    policy: Policy,
    session: Session,
    numbers: Sequence[int],
    feed: Feed,
    *,
    batch_route: BatchRoute = "independent",
    executor: Executor | None = None,
    columns: int = 0,
    steering: Steering | None = None,
    held: Sequence[SequenceState] | None = None,
    ahead: Mapping[int, PlannedPrompt] | None = None,
    apart: Collection[int] = (),
    words: int | None = None,
) -> StepOutput:
    """Feed new tokens to some sequences of a session: prefill, decode, or any mix of the two.

    A pass that fails or is interrupted leaves the session as it was.

    Args:
        backbone: Runs the blocks.
        policy: Chooses them.
        session: What came before.
        numbers: The sequences, in the order of the feed.
        feed: What is new.
        batch_route: Whose scores rank the blocks.
        executor: Runs the passes that it takes; the general path is its reference.
        columns: Columns of a padded batch that the feed was made of.
        steering: Says who runs what, in the place of the policy.
        held: The sequences as they are to go on, where a source or a rule of theirs is another now.
        ahead: Of sequences that are fed a part of their prompt, the plan of the whole of it. Their
            budgets are those of these plans.
        apart: Sequences that are routed independently, whatever `batch_route` says.
        words: How many token ids need logits, from the first on, where the pass makes them; None =
            all.

    Raises:
        BudgetError: A budget cannot be spent.
        PromptError: The session does not hold a sequence, or a sequence is named twice.
    """
    held = session.find(numbers) if held is None else held
    check_context(held, feed, backbone)
    prompts = None if ahead is None else [ahead.get(number) for number in numbers]
    budgets = ask_budgets(held, feed, backbone.num_blocks)
    if prompts is not None:
        budgets = [
            each if one is None else (int(one.runs.sum()),)
            for each, one in zip(budgets, prompts, strict=True)
        ]
    places = [place for place, number in enumerate(numbers) if number in apart] if apart else ()
    how = steering or make_steering(
        policy, held, budgets, batch_route, feed.router_sees, apart=places, prompts=prompts
    )
    if settles(policy):
        executor = None
    lanes = session.begin(held, feed.counts)
    try:
        out = _run(backbone, session, lanes, feed, how, executor, words)
        after = _after(held, out, how, budgets, are_prompts(held, feed))
        sequences = {**session.sequences, **dict(zip(numbers, after, strict=True))}
        session.commit(SessionState(sequences, session.state.columns + columns))
        return out
    except BaseException:
        session.settle()
        raise


def _run(
    backbone: Backbone,
    session: Session,
    lanes: Lanes,
    feed: Feed,
    steering: Steering,
    executor: Executor | None,
    words: int | None,
) -> StepOutput:
    takes = executor is not None and not torch.is_grad_enabled() and executor.takes(lanes)
    fast = executor if takes else None
    run: Run
    if fast is None:
        run = BlockRun(backbone, lanes, session.kv, feed.token_ids, feed.router_sees)
    else:
        run = fast.begin(session, lanes, feed.token_ids, feed.router_sees)
    plan, logits = steer(run, steering, backbone.num_blocks, words)
    engine = GENERAL if fast is None else fast.name
    return StepOutput(lanes, run.hidden, plan, run.executed(), logits, engine)


def run_once(
    backbone: Backbone,
    policy: Policy,
    feed: Feed,
    budgets: Sequence[tuple[int, ...]],
    *,
    batch_route: BatchRoute = "independent",
    steering: Steering | None = None,
) -> StepOutput:
    """One pass over whole sequences that keeps nothing, so that gradients flow.

    Args:
        backbone: Runs the blocks.
        policy: Chooses them.
        feed: The sequences.
        budgets: Of each sequence, in blocks: one for all its tokens, or one for each.
        batch_route: Whose scores rank the blocks.
        steering: Says who runs what, in the place of the policy.
    """
    lanes = Lanes.prompts(feed.counts, feed.token_ids.device)
    kv = PassingKV(backbone.project, lanes, hides=getattr(policy, "hides_skipped", False))
    run = BlockRun(backbone, lanes, kv, feed.token_ids, feed.router_sees)
    new = (None,) * len(budgets)
    how = steering or make_steering(policy, new, budgets, batch_route, feed.router_sees)
    plan, logits = steer(run, how, backbone.num_blocks)
    return StepOutput(lanes, run.hidden, plan, run.executed(), logits)


def make_steering(
    policy: Policy,
    held: Sequence[SequenceState | None],
    budgets: Sequence[tuple[int, ...]],
    batch_route: BatchRoute,
    router_sees: Bool[Tensor, " lanes"] | None = None,
    *,
    apart: Collection[int] = (),
    prompts: Sequence[PlannedPrompt | None] | None = None,
) -> Steering:
    """How a policy steers a pass over these sequences.

    Args:
        policy: Chooses the blocks.
        held: What is known of each sequence; None for a new one.
        budgets: Of each sequence: one for all its new tokens, or one for each.
        batch_route: Whose scores rank the blocks.
        router_sees: Lanes that an online policy may see; None = all.
        apart: Places of sequences that are routed independently, whatever `batch_route` says.
        prompts: Of each sequence, the plan of its whole prompt, of which it is fed a part; None =
            it has none. A policy that `plans_ahead` has made them.

    Raises:
        BudgetError: A budget cannot be spent.
    """
    if is_online(policy):
        below = next((b for each in budgets for b in each if b != policy.num_blocks), None)
        if below is not None:
            raise BudgetError(
                f"policy {policy.name!r} decides while it runs and keeps no budget, and the budget "
                f"is {below} of {policy.num_blocks} blocks: leave the budget out"
            )
        return Online(cast(OnlinePolicy, policy), held, router_sees)
    scoring = cast(DepthPolicy, policy)
    for each in budgets:
        check_spendable(set(each), scoring.num_blocks, scoring.pinned)
    if prompts is None:
        return Budgeted(scoring, held, budgets, batch_route, apart)
    others = [place for place, one in enumerate(prompts) if one is None]
    inner = Budgeted(
        scoring,
        [held[place] for place in others],
        [budgets[place] for place in others],
        batch_route,
        [at for at, place in enumerate(others) if place in apart],
    )
    return Ahead(inner, prompts)


def ask_budgets(
    held: Sequence[SequenceState], feed: Feed, num_blocks: int
) -> list[tuple[int, ...]]:
    """What each sequence's source allows its new tokens: one budget for all, or one for each.

    Raises:
        BudgetError: A source names no budget that the model can spend.
    """
    if all(type(one.source) is ConstantBudget for one in held):
        return [(cast(ConstantBudget, one.source).each,) for one in held]
    fed: list[int] = []
    if any(reads_tokens(one.source) for one in held):
        fed = feed.token_ids.tolist()
    asked, first = [], 0
    for one, count, is_prompt in zip(held, feed.counts, are_prompts(held, feed), strict=True):
        progress = Progress(
            is_prompt=is_prompt,
            new_tokens=count,
            tokens=one.length,
            executed=one.executed,
            num_blocks=num_blocks,
            answer_tokens=one.length - one.prompt_length,
            answer_executed=one.executed - one.prompt_executed,
            token_ids=tuple(fed[first : first + count]) if reads_tokens(one.source) else (),
        )
        asked.append(blocks_of_lanes(one.source, progress))
        first += count
    return asked


def are_prompts(held: Sequence[SequenceState], feed: Feed) -> tuple[bool, ...]:
    """Of each sequence, whether its new tokens are of its prompt."""
    return feed.prompts or tuple(one.steps == 0 for one in held)


def _after(
    held: Sequence[SequenceState],
    out: StepOutput,
    steering: Steering,
    budgets: Sequence[tuple[int, ...]],
    prompts: Sequence[bool],
) -> list[SequenceState]:
    """What the sequences carry on from a pass."""
    lanes, executed = out.lanes, out.executed.numpy()
    spent = executed if lanes.is_one_each else np.add.reduceat(executed, lanes.first)
    routes = (
        steering.routes if isinstance(steering, Budgeted | Ahead) else [one.route for one in held]
    )
    return [
        SequenceState(  # written out: `replace` takes ten times as long
            row=one.row,
            source=one.source,
            reroute=one.reroute,
            length=one.length + lanes.counts[place],
            steps=one.steps + 1,
            executed=one.executed + int(spent[place]),
            prompt_length=one.prompt_length + lanes.counts[place] * prompts[place],
            prompt_executed=one.prompt_executed + int(spent[place]) * prompts[place],
            route=routes[place],
            runs=out.plan.host[lanes.last[place]],
            blocks=budgets[place][-1],
        )
        for place, one in enumerate(held)
    ]
