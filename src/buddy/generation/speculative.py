"""Lossless decoding with one model: drafted at a low budget, verified at the asked one.

A few tokens are drafted by few blocks; one pass at the asked budget over all of them says how many
it would have chosen itself, and adds one of its own. Drafts and verification share weights and
cache: what a draft has left in the cache is cut off, and written anew by the verification.

Source: the acceptance rule is that of speculative sampling (Leviathan et al., 2023); drafting by
the model's own first or routed blocks is that of LayerSkip, SWIFT and CLaSp.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.depth.policy import Observation
from buddy.engine.run import Step, StepOutput, run_step
from buddy.errors import PolicyError
from buddy.generation.loop import Stop, next_token, prefill_step

_FIRST_DRAFT: Final = 3
_LONGEST_DRAFT: Final = 8


@dataclass(slots=True)
class DraftLength:
    """How many tokens to draft: one more than were accepted of the draft before."""

    tokens: int = _FIRST_DRAFT

    def learn(self, accepted: int) -> None:
        """Take in how many of a draft were accepted."""
        self.tokens = min(_LONGEST_DRAFT, accepted + 1)


def check_speculation(batch: int, budgets: tuple[int, ...], num_blocks: int, draft: int) -> None:
    """Refuse what cannot be drafted for.

    Raises:
        PolicyError: Several rows, a reduced budget, or a draft that saves nothing.
    """
    if batch != 1:
        raise PolicyError(f"draft_budget is for one sequence at a time, got a batch of {batch}")
    if budgets != (num_blocks,):
        raise PolicyError(
            f"draft_budget verifies at full depth, and the budget is {budgets[0]} of {num_blocks} "
            "blocks: leave the budget out"
        )
    if draft >= num_blocks:
        raise PolicyError(f"draft_budget must be below the model's {num_blocks} blocks")


@torch.no_grad()
def speculative_loop(
    model: Any,
    input_ids: Int[Tensor, "one tokens"],
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    *,
    draft_blocks: int,
    **inputs: Any,
) -> Int[Tensor, "one columns"]:
    """Prefill, then drafts and verifications; called by transformers' `generate`."""
    stop = Stop(stopping_criteria)
    writer = _Writer(model, inputs, logits_processor, generation_config.do_sample, draft_blocks)
    length = DraftLength()
    ids, logits = input_ids, prefill_step(model, input_ids, inputs)
    scores = logits_processor(ids, logits)
    pending = next_token(scores, generation_config.do_sample)
    while True:
        ids = torch.cat([ids, pending[None]], 1)
        if streamer is not None:
            streamer.put(pending.cpu())
        if stop(ids, scores) is not None:
            break
        room = stop.columns - ids.shape[1] - 1 if stop.columns else _LONGEST_DRAFT
        tokens, proposed = writer.draft(ids, max(0, min(length.tokens, room)))
        fresh, scores = writer.verify(ids, tokens, proposed)
        if len(tokens):
            length.learn(len(fresh) - 1)
        for token in fresh[:-1]:
            ids = torch.cat([ids, token.view(1, 1)], 1)
            if streamer is not None:
                streamer.put(token.view(1).cpu())
            if stop(ids, scores) is not None:
                break
        else:
            pending = fresh[-1:]
            continue
        break
    if streamer is not None:
        streamer.end()
    return ids


class _Writer:
    """Drafts and verifies on one session."""

    def __init__(
        self, model: Any, inputs: dict[str, Any], processor: Any, do_sample: bool, blocks: int
    ) -> None:
        self._model, self._processor, self._sample = model, processor, do_sample
        self._session, self._blocks = inputs["past_key_values"], blocks
        self._reroute, self._trace = inputs["reroute"], inputs["trace"]
        self._policy, self._native = model.inference_policy(), model.decoder.native()

    def draft(
        self, ids: Int[Tensor, "one columns"], tokens: int
    ) -> tuple[Int[Tensor, " drafted"], list[Tensor]]:
        """Tokens after `ids`, and what each was drawn from; the cache stays as it was."""
        session = self._session
        start, before = session.timeline.length, session.state
        proposed: list[Tensor] = []
        here = ids
        for _ in range(tokens):
            logits, _ = self._forward(here[:, -1:], self._blocks)
            scores = self._processor(here, logits[:, -1].float())
            proposed.append(scores)
            here = torch.cat([here, next_token(scores, self._sample)[None]], 1)
        if tokens:
            session.cut(start)
            session.state = before
        return here[0, ids.shape[1] :], proposed

    def verify(
        self,
        ids: Int[Tensor, "one columns"],
        drafted: Int[Tensor, " drafted"],
        proposed: list[Tensor],
    ) -> tuple[Int[Tensor, " fresh"], Float[Tensor, "one vocab"]]:
        """The drafted tokens that full depth accepts, and one of its own; its last scores."""
        session = self._session
        start, route = session.timeline.length, session.route
        started_s = 0.0 if self._trace is None else self._trace.clock()
        fed = torch.cat([ids[:, -1:], drafted[None]], 1)
        logits, out = self._forward(fed, self._model.num_blocks)
        fresh: list[Tensor] = []
        here = ids
        for place in range(len(drafted) + 1):
            scores = self._processor(here, logits[:, place].float())
            if place == len(drafted):
                fresh.append(next_token(scores, self._sample)[0])
                break
            token, is_accepted = self._judge(drafted[place], proposed[place], scores)
            fresh.append(token)
            if not is_accepted:
                break
            here = torch.cat([here, token.view(1, 1)], 1)
        self._keep(fed, start, len(fresh), route)
        if self._trace is not None:
            self._trace.record(out.plan, out.executed.tolist(), len(fresh), started_s)
        return torch.stack(fresh), scores

    def _judge(self, token: Tensor, proposed: Tensor, scores: Tensor) -> tuple[Tensor, bool]:
        """Speculative sampling: what comes out is distributed as full depth alone would draw it."""
        if not self._sample:
            best = scores.argmax(-1)[0]
            return best, bool(best == token)
        draft, full = proposed.softmax(-1)[0], scores.softmax(-1)[0]
        if bool(torch.rand(()) * draft[token] < full[token]):
            return token, True
        rest = (full - draft).clamp(min=0)
        return torch.multinomial(rest / rest.sum(), 1)[0], False

    def _keep(self, fed: Int[Tensor, "one tokens"], start: int, tokens: int, route: Any) -> None:
        """Cut the session back to what was accepted, and show the policy just that."""
        session, policy = self._session, self._policy
        seen = Observation(fed[:, :tokens], torch.ones_like(fed[:, :tokens], dtype=torch.bool))
        if policy.context_layer:
            keys, values = session.kv.new_tokens(policy.context_layer - 1)
            seen = replace(seen, keys=keys[:, :tokens], values=values[:, :tokens])
        session.route = policy.observe(route, seen)
        session.cut(start + tokens)

    def _forward(
        self, token_ids: Int[Tensor, "one tokens"], blocks: int
    ) -> tuple[Float[Tensor, "one tokens vocab"], StepOutput]:
        every = torch.ones_like(token_ids, dtype=torch.bool)
        step = Step(
            token_ids=token_ids,
            valid=every,
            counted=every,
            budgets=(blocks,),
            reroute=self._reroute,
        )
        out = run_step(self._model.backbone, self._policy, self._session, step, self._native)
        logits = self._model.backbone.logits(out.hidden) if out.logits is None else out.logits
        return logits, out
