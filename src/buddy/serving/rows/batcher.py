"""Continuous batching: requests take rows, prompts are fed in parts, and tokens are delivered.

One pass feeds the last token of every row that decodes and parts of some prompts. Requests join and
leave between passes. It knows nothing of threads; `engine.py` does.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from buddy.engine.planned_prompt import plan_prompt
from buddy.engine.step import StepOutput
from buddy.errors import BuddyError, is_failure
from buddy.inference import InferenceModel
from buddy.serving.control.protocol import Control, Ending, Orders, QueueView
from buddy.serving.request import Delta, Event, Failed, Finished, FinishReason, GrammarError, Usage
from buddy.serving.rows.drafts import NO_DRAFTS, RowDrafter
from buddy.serving.rows.failures import why_failed
from buddy.serving.rows.new_row import make_row
from buddy.serving.rows.options import BatcherOptions
from buddy.serving.rows.passes import LEAST_CUT, Pass, PassRunner, Ran, cut
from buddy.serving.rows.pool import Pool
from buddy.serving.rows.row import Row, Submitted, best_beginning
from buddy.serving.rows.sampler import Picked, pick
from buddy.serving.rows.taking import take_token

_LOG: Final = logging.getLogger(__name__)

_KEPT_CONTEXTS: Final = 2
"""Contexts that kept prefixes may fill, all together: their memory is of use to few."""


class Batcher:
    """Runs requests side by side on one session. All calls come from one thread.

    Args:
        model: Its weights and its policy must not change while it is in use.
        tokenizer: The model's, as transformers wraps it.
        control: Says how deep rows run and how much prompt a pass feeds.
        options: How requests run side by side.
        ends: Tokens that end an answer.
    """

    def __init__(
        self,
        model: InferenceModel,
        tokenizer: Any,
        control: Control,
        options: BatcherOptions,
        ends: Sequence[int],
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._control, self.options = control, options
        self._ends, self._device = frozenset(ends), model.backbone.device
        session = model.new_session(options.rows, options.slots)
        self._runner = PassRunner(model, session, options.batch_route)
        self._drafter = RowDrafter(self._runner.shallow_passes(), self._runner.steady_lanes)
        self._plans_ahead = self._runner.policy.plans_ahead
        num_kept = options.kept_prefixes if self._plans_ahead else 0
        session.kv.reserve(options.rows + num_kept, 0)  # while it is empty: later all is copied
        most_tokens = _KEPT_CONTEXTS * model.backbone.context
        self.pool = Pool(session, num_kept, most_tokens, options.least_shared)
        self.waiting: deque[Submitted] = deque()
        self.rows: list[Row] = []
        self.steps = 0
        """Passes so far."""
        self._admits = True

    @property
    def has_work(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self.waiting or self.rows)

    def queue(self, now_s: float, coming: Sequence[Submitted] = ()) -> QueueView:
        """Who waits; may be called from any thread. Those that come wait behind all others."""
        waiting, rows, runner = (*tuple(self.waiting), *coming), tuple(self.rows), self._runner
        return QueueView(
            size=len(waiting),
            prompt_tokens=float(sum(runner.prompt_tokens(each.request) for each in waiting)),
            oldest_s=now_s - waiting[0].at_s if waiting else 0.0,
            running=len(rows),
            prompt_tokens_running=float(sum(row.prompt_left * runner.weight(row) for row in rows)),
            head_blocks=runner.head_blocks,
        )

    def add(self, submitted: Submitted) -> None:
        """Let a request wait for a row."""
        self.waiting.append(submitted)

    def cancel(self, number: int) -> None:
        """Let go of a request, wherever it is; one that has ended is no error."""
        for submitted in self.waiting:
            if submitted.number == number:
                self.waiting.remove(submitted)
                self._note_end(submitted, "cancelled", None)
                return
        for row in self.rows:
            if row.number == number:
                self._let_go(row, "cancelled")
                return

    def fail(self, message: str) -> None:
        """End every request with this message."""
        rows, waiting = tuple(self.rows), tuple(self.waiting)
        self.rows.clear()
        self.waiting.clear()
        for row in rows:
            row.is_gone = True
        for submitted in (*(row.submitted for row in rows), *waiting):
            self._tell(submitted, Failed(message=message))
        for row in rows:
            self._note_end(row.submitted, "failed", row.usage())
        for submitted in waiting:
            self._note_end(submitted, "failed", None)

    @torch.no_grad()
    def step(self) -> None:
        """One pass, or two where no executor takes decode steps and prompts together."""
        self._admit()
        if not self.rows:
            return
        orders = self._control.decide(
            [row.view() for row in self.rows], self.queue(time.perf_counter())
        )
        self._admits = orders.admits
        self._set_depths(orders)
        decoding = [row for row in self.rows if not row.prompt_left]
        parts = self._parts(orders, is_idle=not decoding)
        started_s, drafts = time.perf_counter(), NO_DRAFTS
        if not parts:
            drafts = self._drafter.draft(decoding, allows_passes=orders.allows_draft_passes)
        for one_pass in self._runner.divide(decoding, parts, drafts):
            self._pass(one_pass)
        if not parts:
            self._drafter.measured(time.perf_counter() - started_s)

    # Who takes part

    def _admit(self) -> None:
        """Give free rows to who waits."""
        while self.waiting and len(self.rows) < self.options.rows:
            if not self._admits and self.rows:
                return
            submitted = self.waiting.popleft()
            try:
                self.rows.append(make_row(submitted, self._model, self._tokenizer, self._ends))
            except BaseException as error:  # such as a predictor whose logits are NaN
                self._tell(submitted, Failed(message=why_failed(error, submitted)))
                self._note_end(submitted, "failed", None)

    def _set_depths(self, orders: Orders) -> None:
        if not (orders.depths or orders.unloaded):
            return
        for row in self.rows:
            if row.is_elastic and row.number in orders.depths:
                row.set_depth(orders.depths[row.number])
            row.unloaded = orders.unloaded.get(row.number, row.unloaded)

    def _parts(self, orders: Orders, *, is_idle: bool) -> list[tuple[Row, int]]:
        """Whose prompt is fed in this pass, and how many tokens of it."""
        left = float(max(orders.prompt_tokens, 1) if is_idle else orders.prompt_tokens)
        parts: list[tuple[Row, int]] = []
        before: list[Row] = []
        for row in tuple(self.rows):
            if left < 1:
                break
            if row.prompt_left and (row.sequence is not None or self._begins(row, before)):
                count = self._runner.part(row, left)
                left -= count * self._runner.weight(row)
                parts.append((row, count))
            before.append(row)
        return parts

    def _begins(self, row: Row, before: Sequence[Row]) -> bool:
        """`_begin`, where what fails ends the row alone."""
        try:
            return self._begin(row, before)
        except BaseException as error:
            self._fail(row, error)
            return False

    def _begin(self, row: Row, before: Sequence[Row]) -> bool:
        """Give a row its sequence; False where it is better to wait for another row's prompt."""
        begin = (-1, 0)
        if self._plans_ahead:
            if row.planned is None or int(row.planned.block_mask.sum()) != row.depth:
                ids = torch.from_numpy(row.prompt).to(self._device)
                row.planned = plan_prompt(self._runner.policy, ids, row.depth)
            if self.pool.most_kept and row.scorer is None:  # else tokens would have no logits
                begin, waits = self._beginning(row, before)
                if waits:
                    return False
        row.sequence = self.pool.join(row.depth, begin)
        row.num_fed = row.num_cached = begin[1]
        return True

    def _beginning(self, row: Row, before: Sequence[Row]) -> tuple[tuple[int, int], bool]:
        """The sequence that a row may begin as, and how many tokens; whether to wait for another.

        What an earlier request left differs in its last bits from a prompt of one's own, and a
        drawn text with them. So a row with a seed begins as another with one that runs beside it,
        whose prompt is computed as its own would be, up to where both may be cut; or with nothing.
        """
        least = self.options.least_shared
        if row.is_seeded:
            if not self._runner.steady_lanes:
                return (-1, 0), False
            ahead = [other for other in before if other.is_seeded]
            (number, length), waits = best_beginning(row, ahead, max(least, LEAST_CUT))
            begin = number, cut(len(row.prompt), length)
        else:
            begin, waits = best_beginning(row, before, least)
            assert row.planned is not None
            plan = row.planned.block_mask
            number, length = self.pool.find(row.prompt, plan, row.request.owner)
            length = min(length, len(row.prompt) - 1)
            begin = max(begin, (number, length), key=lambda beginning: beginning[1])
        return (begin if begin[1] >= least else (-1, 0)), waits

    # A pass

    def _pass(self, candidates: Pass) -> None:
        taking = candidates.without_gone()
        rows = taking.rows
        if not rows:
            return
        try:
            ran = self._runner.run(taking)
        except BaseException as error:  # the session is as it was
            if len(rows) == 1:
                self._fail(rows[0], error)
            elif is_failure(error):
                for part in taking.halves():
                    self._pass(part)
            else:
                raise
            return
        self.steps += 1
        out = ran.out
        for place, row in enumerate(rows):
            self._end_prompt(row, out.plan.host[out.lanes.last[place]])
        ready = [place for place, row in enumerate(rows) if not (row.prompt_left or row.is_gone)]
        if ran.steering is not None:
            self._judge(ran)
            return
        lanes = out.lanes.last[ready]
        picked, report = self._choose(ran, ready, lanes)
        self._report(ran, report)
        self._take(ran, ready, lanes, picked)

    def _judge(self, ran: Ran) -> None:
        """Take of each row's draft what it would have chosen, token by token, and one more."""
        rows, lanes = ran.members.rows, ran.out.lanes
        drafts = [ran.members.drafted(row) for row in rows]
        first = lanes.last - np.array([len(drafted) for drafted in drafts])
        places, kept, report = list(range(len(rows))), [0] * len(rows), dict[str, Any]()
        try:
            for number in range(1 + max(map(len, drafts))):
                at = first[places] + number
                picked, waits = self._choose(ran, places, at)
                report = report or waits
                self._take(ran, places, at, picked)
                for place in places:
                    kept[place] = number + 1
                places = [
                    place
                    for place, choice in zip(places, picked, strict=True)
                    if not rows[place].is_gone and drafts[place][number:][:1] == [choice.token]
                ]
                if not places:
                    break
                for place in places:
                    self._runner.take(ran, rows[place], int(first[place]) + number + 1)
        finally:
            self._runner.keep(ran, kept)
        for row, drafted, count in zip(rows, drafts, kept, strict=True):
            if row.drafter is not None and drafted:
                row.drafter.judged(count - 1)
        report |= {"drafted": sum(map(len, drafts)), "accepted": sum(kept) - len(rows)}
        self._report(ran, report)

    def _report(self, ran: Ran, report: dict[str, Any]) -> None:
        self._control.report(replace(ran.measured(), **report, **self._drafter.report()))

    def _choose(
        self, ran: Ran, places: Sequence[int], lanes: NDArray[np.int64]
    ) -> tuple[list[Picked], dict[str, Any]]:
        """The next tokens of rows of a pass, and what a report says of how these waited.

        Args:
            ran: The pass.
            places: Of the rows in it.
            lanes: Whose logits the token of each is chosen from.
        """
        chosen = [ran.members.rows[place] for place in places]
        picked = self._pick(ran.out, lanes, chosen) if chosen else []
        now_s = time.perf_counter()
        gaps = tuple(now_s - row.last_s for row in chosen if row.answer)
        firsts = tuple(now_s - row.submitted.at_s for row in chosen if not row.answer)
        return picked, {"gaps_s": gaps, "firsts_s": firsts}

    def _take(
        self, ran: Ran, places: Sequence[int], lanes: NDArray[np.int64], picked: list[Picked]
    ) -> None:
        """Let rows of a pass go on with these tokens."""
        now_s = time.perf_counter()
        for place, lane, choice in zip(places, lanes.tolist(), picked, strict=True):
            row = ran.members.rows[place]
            try:
                self._accept(row, choice, ran.out.plan.host[lane], now_s)
            except BaseException as error:  # such as a decoder that panics
                self._fail(row, error)

    def _end_prompt(self, row: Row, runs: NDArray[np.bool_]) -> None:
        """Tell what a prompt scored, once all of it has been fed; end its row where it is alone."""
        if row.scorer is not None and row.scorer.failure is not None:
            self._fail(row, row.scorer.failure)
        if row.is_gone or row.prompt_left:
            return
        if row.scorer is not None:
            scores, row.scorer = row.scorer.scores, None
            self._deliver(row, Delta(text="", tokens=(), prompt=scores))
        if not row.request.max_tokens:
            row.note_prompt_alone(runs)
            self._finish(row, "length")

    def _pick(self, out: StepOutput, lanes: NDArray[np.int64], rows: list[Row]) -> list[Picked]:
        """The next token of each row; where that fails, of each by itself."""
        try:
            return pick(self._runner.logits(out, lanes), [row.picker for row in rows])
        except BaseException as error:
            if len(rows) == 1:
                return [Picked(error=why_failed(error, rows[0].submitted))]
            return [self._pick(out, lanes[at : at + 1], [row])[0] for at, row in enumerate(rows)]

    # What comes of it

    def _accept(self, row: Row, picked: Picked, runs: NDArray[np.bool_], now_s: float) -> None:
        """Take a row's next token, tell its client, and end it where it ends."""
        if row.is_gone:
            return
        if picked.error is not None:
            self._tell(row.submitted, Failed(message=picked.error, param=picked.param))
            self._let_go(row, "failed")
            return
        told, reason = take_token(row, picked, runs, now_s, self._ends)
        if told is not None:
            self._deliver(row, told)
        if reason is not None:
            self._finish(row, reason)

    def _fail(self, row: Row, error: BaseException) -> None:
        """End a row alone by what went wrong with it, if the engine can serve others still."""
        param = error.param if isinstance(error, GrammarError) else None
        self._tell(row.submitted, Failed(message=why_failed(error, row.submitted), param=param))
        self._let_go(row, "failed")
        if row.sequence is not None and not isinstance(error, BuddyError):
            self._runner.try_one()

    def _finish(self, row: Row, reason: FinishReason) -> None:
        if not row.is_gone:
            usage = row.usage()
            self._let_go(row, reason)
            self._tell(row.submitted, Finished(reason=reason, usage=usage))

    def _deliver(self, row: Row, event: Event) -> None:
        if not self._tell(row.submitted, event):
            self._let_go(row, "cancelled")

    def _tell(self, submitted: Submitted, event: Event) -> bool:
        """Hand over an event; False where its taker has failed, which must hurt nobody else."""
        try:
            submitted.deliver(event)
        except Exception:
            _LOG.exception(
                "request %d is dropped: what takes its events has failed", submitted.number
            )
            return False
        return True

    def _note_end(self, submitted: Submitted, how: Ending, usage: Usage | None) -> None:
        self._control.ended(how, usage, time.perf_counter() - submitted.at_s)

    def _let_go(self, row: Row, how: Ending) -> None:
        """Give a row back; what it was fed may serve others."""
        if row.is_gone:
            return
        row.is_gone = True
        self.rows.remove(row)
        if row.sequence is not None:
            self.pool.leave(row.sequence, None if how == "failed" else row.kept())
        self._note_end(row.submitted, how, row.usage())
