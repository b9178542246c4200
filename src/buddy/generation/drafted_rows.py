"""Greedy decoding of several rows that are drafted for: each goes on by as many as are right.

So rows are at different places after a pass, and a pass feeds each another number of tokens. A
row's tokens are those of plain decoding, whoever is beside it.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from buddy.engine.feed import Feed
from buddy.engine.run import run_step
from buddy.engine.step import Step, logits_of
from buddy.engine.tokenwise import TokenwiseSteering, keep_tokens
from buddy.generation.draft_checks import check_drafted_rows, steady_depth
from buddy.generation.loop import Stop, prefill_step, real_tokens
from buddy.generation.next_token import best_token, process
from buddy.generation.pass_drafter import PassDrafter
from buddy.generation.shallow import DraftedRow, ShallowPasses
from buddy.generation.text_drafter import TextDrafter


class _Row:
    """The answer of a row so far.

    Args:
        sequence: Its id in the session.
        depth: Blocks of each of its tokens, or the most that there may be.
        drafter: Of its text, which has the prompt.
        most: Tokens of the answer.
        ends: Tokens that end it.
    """

    def __init__(
        self, sequence: int, depth: int, drafter: TextDrafter, most: int, ends: set[int]
    ) -> None:
        self.sequence, self.depth, self._drafter = sequence, depth, drafter
        self._most, self._ends = most, ends
        self.answer: list[int] = []

    def add(self, token: int) -> None:
        """Go on by a token."""
        self.answer.append(token)
        self._drafter.add(token)

    @property
    def is_ended(self) -> bool:
        """Whether no more tokens come."""
        return len(self.answer) == self._most or self.answer[-1] in self._ends

    @property
    def drafted(self) -> DraftedRow:
        """What it is drafted for by."""
        drafter, room = self._drafter, self._most - len(self.answer) - 1
        return DraftedRow(self.sequence, self.answer[-1], room, drafter, drafter.blocks)

    def take(self, drafted: Sequence[int], best: Sequence[int]) -> int:
        """Go on by the best tokens, as far as what was drafted before each is right.

        Args:
            drafted: Tokens that were fed after the last one.
            best: The best token after the last one, and after each of these.

        Returns:
            How many tokens it went on by.
        """
        for number, token in enumerate(best):
            self.add(token)
            if self.is_ended or drafted[number : number + 1] != [token]:
                break
        self._drafter.judged(number)
        return number + 1


@torch.no_grad()
def drafted_rows_loop(
    model: Any,
    input_ids: Int[Tensor, "batch tokens"],
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    *,
    ngrams: bool,
    draft_blocks: int | None,
    **inputs: Any,
) -> Int[Tensor, "batch columns"]:
    """Prefill, then a pass for what each row has drafted.

    N-grams draft where they pay, and `draft_blocks` where they say nothing and these do; None =
    nothing does.

    Raises:
        ModelError: A row's logits are not finite.
        PolicyError: An option is for rows that go on together.
    """
    stop = Stop(stopping_criteria)
    check_drafted_rows(generation_config, logits_processor, stop, streamer, inputs)
    session, trace, device = inputs["cache"], inputs["trace"], input_ids.device
    logits = process(logits_processor, input_ids, prefill_step(model, input_ids, inputs))
    prompts = real_tokens(input_ids, inputs["attention_mask"])
    rows = [
        _Row(
            sequence,
            steady_depth(state.source) or model.num_blocks,
            TextDrafter(prompt, ngrams=ngrams, blocks=draft_blocks),
            stop.columns - input_ids.shape[1],
            stop.ends,
        )
        for prompt, (sequence, state) in zip(prompts, session.sequences.items(), strict=True)
    ]
    for row, token in zip(rows, best_token(logits).tolist(), strict=True):
        row.add(token)
    executor, policy = model.executor.fast_path(), model.inference_policy()
    drafter = PassDrafter(ShallowPasses(model.backbone, policy, session, executor))
    while places := [place for place, row in enumerate(rows) if not row.is_ended]:
        begun_s = time.perf_counter()
        taking = [rows[place] for place in places]
        drafts = drafter.draft([row.drafted for row in taking], [row.depth for row in taking])
        started_s = 0.0 if trace is None else trace.start(model.backbone.devices)
        sequence_ids = [row.sequence for row in taking]
        steering = None
        if any(drafts):
            steering = TokenwiseSteering(policy, session.find(sequence_ids))
        tokens = [
            token
            for row, drafted in zip(taking, drafts, strict=True)
            for token in (row.answer[-1], *drafted)
        ]
        counts = tuple(1 + len(drafted) for drafted in drafts)
        feed = Feed(token_ids=torch.tensor(tokens, device=device), counts=counts)
        step = Step(sequence_ids=sequence_ids, feed=feed, steering=steering)
        out = run_step(model.backbone, policy, session, step, executor=executor)
        logits = process(
            logits_processor, input_ids, logits_of(model.backbone, out, executor).float()
        )
        best, kept = best_token(logits).tolist(), list[int]()
        for row, drafted, last in zip(taking, drafts, out.lanes.last.tolist(), strict=True):
            kept.append(row.take(drafted, best[last - len(drafted) : last + 1]))
        if steering is not None:
            states = [steering.after(at, count) for at, count in enumerate(kept)]
            keep_tokens(session, dict(zip(sequence_ids, states, strict=True)))
        if trace is not None:
            trace.record(out, started_s, tokens=1, rows=places, batch=len(rows), kept=kept)
        drafter.measured(time.perf_counter() - begun_s)
    longest = max(len(row.answer) for row in rows)
    pad = int(generation_config._pad_token_tensor) if stop.pads else 0  # else all are as long
    answers = [row.answer + [pad] * (longest - len(row.answer)) for row in rows]
    return torch.cat([input_ids, input_ids.new_tensor(answers)], 1)
