"""The decode loop for greedy decoding and sampling: transformers' settings, little bookkeeping.

transformers prepares the prompt, the logits processors and the stopping criteria; from there on a
step is a forward pass, a token and little else. Other modes (beams, assistants, scores on return)
go through transformers' own loop, which is the reference.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from buddy.depth.plan import on_device
from buddy.engine.feed import Feed
from buddy.engine.run import run_step
from buddy.engine.state.sequence import SequenceState
from buddy.engine.state.session import Session
from buddy.engine.step import Step, logits_of
from buddy.generation.next_token import FiniteLogits, next_token, process, written


class Stop:
    """The stopping criteria; those that are mere comparisons are made as such."""

    def __init__(self, criteria: list[StoppingCriteria]) -> None:
        self.columns = min(
            [rule.max_length for rule in criteria if isinstance(rule, MaxLengthCriteria)],
            default=0,
        )
        self.ends = {
            token
            for rule in criteria
            if isinstance(rule, EosTokenCriteria)
            for token in rule.eos_token_id.tolist()
        }
        self.pads = any(hasattr(rule, "eos_token_id") for rule in criteria)
        """Whether rows that have ended are filled up with pads, and fed no more; else, as in
        transformers, all rows are written to the end of the last."""
        self.others = [
            rule for rule in criteria if not isinstance(rule, MaxLengthCriteria | EosTokenCriteria)
        ]

    def __call__(
        self, ids: Int[Tensor, "batch columns"], newest: Sequence[int], logits: Tensor
    ) -> set[int]:
        """The rows that end with the newest column, which the host has too."""
        if self.columns and ids.shape[1] >= self.columns:
            return set(range(len(ids)))
        ended = {row for row, token in enumerate(newest) if token in self.ends}
        if self.others:
            done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
            for other in self.others:
                done = done | other(ids, logits)
            ended.update(done.nonzero()[:, 0].tolist())
        return ended


class Text:
    """The columns of a batch so far, which are streamed as they come and know where they end.

    Args:
        ids: The prompts.
        criteria: Where it ends.
        streamer: Told of each column; None = nobody.
    """

    def __init__(self, ids: Int[Tensor, "batch columns"], criteria: Any, streamer: Any) -> None:
        self.stop, self._streamer = Stop(criteria), streamer
        batch, self._columns = ids.shape
        most, least = self.stop.columns, self._columns + 1
        self._buffer = ids.new_empty(batch, max(most, least) if most else least + 255)
        self._buffer[:, : self._columns] = ids

    @property
    def ids(self) -> Int[Tensor, "batch columns"]:
        """All columns."""
        return self._buffer[:, : self._columns]

    @property
    def room(self) -> int:
        """Most columns that may still be written."""
        end = self.stop.columns
        return end - self._columns if end else sys.maxsize

    def add(self, token: Int[Tensor, " batch"], scores: Float[Tensor, "batch vocab"]) -> set[int]:
        """Append a column; the rows that end with it.

        Raises:
            ModelError: There is no token for a row, as its logits are not finite.
        """
        newest = written(token, self._columns)
        if self._columns == self._buffer.shape[1]:
            self._buffer = torch.nn.functional.pad(self._buffer, (0, self._columns))
        self._buffer[:, self._columns] = token
        self._columns += 1
        if self._streamer is not None:
            self._streamer.put(torch.tensor(newest))
        return self.stop(self.ids, newest, scores)

    def end(self) -> Int[Tensor, "batch columns"]:
        """All columns, now that there are no more to come."""
        if self._streamer is not None:
            self._streamer.end()
        return self.ids


@torch.no_grad()
def decode_loop(
    model: Any,
    input_ids: Int[Tensor, "batch tokens"],
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    **inputs: Any,
) -> Int[Tensor, "batch columns"]:
    """Prefill, then a token at a time."""
    session, trace = inputs["cache"], inputs["trace"]
    text = Text(input_ids, stopping_criteria, streamer)
    batch, pads, device = len(input_ids), text.stop.pads, input_ids.device
    if device.type != "cpu":  # `Text` refuses what is not finite when it has the tokens
        rules = logits_processor
        logits_processor = [rule for rule in rules if not isinstance(rule, FiniteLogits)]
    open_rows, ended_rows = list(range(batch)), set[int]()
    is_ended = torch.zeros(batch, dtype=torch.bool, device=device)
    logits = prefill_step(model, input_ids, inputs)
    ids_of_rows = list(session.sequences)
    executor, policy = model.executor.fast_path(), model.inference_policy()
    while True:
        scores = process(logits_processor, text.ids, logits)
        token = next_token(scores, generation_config.do_sample)
        if pads and ended_rows:
            token = torch.where(is_ended, generation_config._pad_token_tensor.to(device), token)
        ended = text.add(token, scores) - ended_rows
        if ended:
            ended_rows |= ended
            if len(ended_rows) == batch:
                return text.end()
            is_ended = on_device(np.isin(np.arange(batch), list(ended_rows)), device)
        fed_rows = open_rows
        if ended and pads:
            open_rows = [row for row in open_rows if row not in ended_rows]
            # A caller who goes on from the session takes a row's last token for fed.
            fed_rows = fed_rows if session._is_user_defined else open_rows
        started_s = 0.0 if trace is None else trace.start(model.backbone.devices)
        is_whole = len(fed_rows) == batch
        at = None if is_whole else on_device(np.array(fed_rows), device)
        alone = [ids_of_rows[row] for row in fed_rows if row in ended_rows] if pads else ()
        step = Step(
            sequence_ids=ids_of_rows if is_whole else [ids_of_rows[row] for row in fed_rows],
            feed=Feed(token_ids=token if at is None else token[at], counts=(1,) * len(fed_rows)),
            batch_route=inputs["batch_route"],
            routed_alone=alone,
            columns=1,
        )
        out = run_step(model.backbone, policy, session, step, executor=executor)
        last = logits_of(model.backbone, out, executor)
        # A row that has ended is fed no more, and keeps its last logits.
        logits = last.float() if at is None else logits.index_copy(0, at, last.float())
        if trace is not None:
            trace.record(out, started_s, tokens=1, rows=fed_rows, batch=batch)


class EndedRows(StoppingCriteriaList):
    """The criteria for transformers' loop, which feeds pads to rows that have ended.

    It remembers each row as it was when its last token had been fed.
    """

    def __init__(self, criteria: list[StoppingCriteria], session: Session) -> None:
        super().__init__(criteria)
        self._session, self._pads = session, Stop(criteria).pads
        self._ended, self._before_pads = set[int](), dict[int, SequenceState]()

    def __call__(
        self, input_ids: Int[Tensor, "batch columns"], scores: Any, **options: Any
    ) -> Bool[Tensor, " batch"]:
        """The rows that end with the newest column."""
        now = list(self._session.sequences.values())
        self._before_pads |= {row: now[row] for row in self._ended - self._before_pads.keys()}
        done: Bool[Tensor, " batch"] = super().__call__(input_ids, scores, **options)
        if self._pads:
            self._ended |= set(done.nonzero()[:, 0].tolist())
        return done

    def take_pads_back(self) -> None:
        """Leave in the session what was written, without the pads."""
        if not self._before_pads:
            return
        state = self._session.state
        rows = enumerate(state.sequences.items())
        written = {at: self._before_pads.get(row, sequence) for row, (at, sequence) in rows}
        self._session.rewind(replace(state, sequences=written))


def real_tokens(
    ids: Int[Tensor, "batch columns"], mask: Int[Tensor, "batch columns"] | None
) -> list[list[int]]:
    """The tokens of each row, without pads.

    Args:
        ids: Rows.
        mask: 0 = pad; None = there are none.
    """
    if mask is None:
        rows: list[list[int]] = ids.tolist()
        return rows
    return [row[real].tolist() for row, real in zip(ids, mask.bool(), strict=True)]


def prefill_step(
    model: Any, input_ids: Int[Tensor, "batch tokens"], inputs: dict[str, Any]
) -> Float[Tensor, "batch vocab"]:
    """Feed what a session has not seen of the prompt; logits after its last column, float32."""
    out = model(
        input_ids[:, inputs["cache"].get_seq_length() :],
        inputs["attention_mask"],
        budget=inputs["budget"],
        budget_rows=inputs["budget_rows"],
        cache=inputs["cache"],
        reroute=inputs["reroute"],
        batch_route=inputs["batch_route"],
        logits_to_keep=1,
        trace=inputs["trace"],
    )
    return out.logits[:, -1].float()  # type: ignore[no-any-return]
