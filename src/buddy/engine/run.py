"""One pass: new tokens of some sequences, from the embedding through the last block."""

from collections.abc import Collection, Sequence
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.depth.policy import OnlinePolicy, Policy
from buddy.engine.executors.blocks import BlockRun
from buddy.engine.executors.protocol import GENERAL, Executor, Run
from buddy.engine.feed import Feed
from buddy.engine.planned_prompt import PlannedPrompt
from buddy.engine.state.lanes import Lanes
from buddy.engine.state.passing import PassingKV
from buddy.engine.state.sequence import Reroute, RouteRow, SequenceState
from buddy.engine.state.session import Session, SessionState
from buddy.engine.steer import (
    BatchRoute,
    BudgetedSteering,
    OnlineSteering,
    PlannedPromptSteering,
    Steering,
    steer,
)
from buddy.engine.step import (
    Step,
    StepOutput,
    are_prompts,
    ask_budgets,
    ask_notes,
    check_context,
)
from buddy.errors import PolicyError


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
    step: Step,
    *,
    executor: Executor | None = None,
) -> StepOutput:
    """Feed new tokens to some sequences of a session: prefill, decode, or any mix of the two.

    A pass that fails or is interrupted leaves the session as it was.

    Args:
        backbone: Runs the blocks.
        policy: Chooses them.
        session: What came before.
        step: What is new, and how it is routed.
        executor: Runs the passes that it takes; the general path is its reference.

    Raises:
        BudgetError: A budget cannot be spent.
        PromptError: The session does not hold a sequence, or a sequence is named twice.
    """
    ids, feed, sequences = step.sequence_ids, step.feed, step.sequences
    if sequences is None:
        sequences = session.find(ids)
    check_context(sequences, feed, backbone)
    steering = step.steering
    if steering is None:
        prompts = None
        budgets = ask_budgets(sequences, feed, backbone.num_blocks)
        if step.planned_prompts:
            prompts = [step.planned_prompts.get(sequence_id) for sequence_id in ids]
            budgets = [
                budget if prompt is None else (int(prompt.block_mask.sum()),)
                for budget, prompt in zip(budgets, prompts, strict=True)
            ]
        named = step.routed_alone
        alone = named and [place for place, at in enumerate(ids) if at in named]
        steering = make_steering(
            policy,
            sequences,
            budgets,
            step.batch_route,
            feed.router_sees,
            routed_alone=alone,
            prompts=prompts,
        )
    lanes = session.begin(sequences, feed.counts)
    try:
        run, engine = begin_run(
            backbone,
            session,
            lanes,
            feed,
            None if policy.adjusts_output else executor,
            keeps_mlp=policy.reads_mlp,
        )
        plan, logits = steer(run, steering, backbone.num_blocks, step.num_logits)
        out = StepOutput(lanes, run.hidden, plan, run.executed(), logits, engine)
        notes = ask_notes(sequences, feed, backbone.num_blocks)
        after = _after(sequences, out, steering, are_prompts(sequences, feed), notes)
        committed = {**session.sequences, **dict(zip(ids, after, strict=True))}
        session.commit(SessionState(committed, session.state.columns + step.columns))
        return out
    except BaseException:
        session.discard_uncommitted(has_failed=True)
        raise


def begin_run(
    backbone: Backbone,
    session: Session,
    lanes: Lanes,
    feed: Feed,
    executor: Executor | None,
    *,
    keeps_mlp: bool = False,
) -> tuple[Run, str]:
    """A pass on the executor, where it takes it, else on the general path; and who runs it."""
    if executor is not None and not torch.is_grad_enabled() and executor.takes(lanes):
        return executor.begin(session, lanes, feed), executor.name
    general = BlockRun(
        backbone, lanes, session.kv, feed.token_ids, feed.router_sees, keeps_mlp=keeps_mlp
    )
    return general, GENERAL


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
    kv = PassingKV(backbone.project, lanes, hides=policy.hides_skipped)
    run = BlockRun(
        backbone, lanes, kv, feed.token_ids, feed.router_sees, keeps_mlp=policy.reads_mlp
    )
    new = (None,) * len(budgets)
    how = steering or make_steering(policy, new, budgets, batch_route, feed.router_sees)
    plan, logits = steer(run, how, backbone.num_blocks)
    return StepOutput(lanes, run.hidden, plan, run.executed(), logits)


def make_steering(
    policy: Policy,
    sequences: Sequence[SequenceState | None],
    budgets: Sequence[tuple[int, ...]],
    batch_route: BatchRoute,
    router_sees: Bool[Tensor, " lanes"] | None = None,
    *,
    routed_alone: Collection[int] = (),
    prompts: Sequence[PlannedPrompt | None] | None = None,
) -> Steering:
    """How a policy steers a pass over these sequences.

    Args:
        policy: Chooses the blocks.
        sequences: What is known of each sequence; None for a new one.
        budgets: Of each sequence: one for all its new tokens, or one for each.
        batch_route: Whose scores rank the blocks.
        router_sees: Lanes that an online policy may see; None = all.
        routed_alone: Places of sequences that are routed independently, whatever `batch_route`
            says.
        prompts: Of each sequence, the plan of its whole prompt, of which it is fed a part; None =
            it has none. A policy that `plans_ahead` has made them.

    Raises:
        BudgetError: A budget cannot be spent.
    """
    for budget in budgets:
        policy.check_spendable(set(budget))
    if isinstance(policy, OnlinePolicy):
        return OnlineSteering(policy, sequences, router_sees)
    if prompts is None:
        return BudgetedSteering(
            policy, sequences, budgets, batch_route, routed_alone, sees_all=router_sees is None
        )
    others = [place for place, prompt in enumerate(prompts) if prompt is None]
    inner = BudgetedSteering(
        policy,
        [sequences[place] for place in others],
        [budgets[place] for place in others],
        batch_route,
        [at for at, place in enumerate(others) if place in routed_alone],
        sees_all=router_sees is None,
    )
    return PlannedPromptSteering(inner, prompts)


def _after(
    sequences: Sequence[SequenceState],
    out: StepOutput,
    steering: Steering,
    prompts: Sequence[bool],
    notes: Sequence[Any],
) -> list[SequenceState]:
    """What the sequences carry on from a pass."""
    lanes, executed = out.lanes, out.executed.numpy()
    spent = executed if lanes.is_one_each else np.add.reduceat(executed, lanes.first)
    routes: Sequence[RouteRow | None] = steering.routes or [
        sequence.route for sequence in sequences
    ]
    return [
        SequenceState(  # written out: `replace` takes ten times as long
            row=before.row,
            source=before.source,
            reroute=before.reroute,
            length=before.length + lanes.counts[place],
            steps=before.steps + 1,
            executed=before.executed + int(spent[place]),
            note=notes[place],
            prompt_length=before.prompt_length + lanes.counts[place] * prompts[place],
            prompt_executed=before.prompt_executed + int(spent[place]) * prompts[place],
            route=routes[place],
            block_mask=out.plan.host[lanes.last[place]],
            blocks=int(executed[lanes.last[place]]),
        )
        for place, before in enumerate(sequences)
    ]
