"""The engine: a thread that runs a batcher, and the door through which other threads reach it."""

import logging
import threading
import time
from collections.abc import Sequence
from itertools import count
from typing import Any, Final

import torch

from buddy.backbone.backbone import check_token_ids
from buddy.budget.blocks import least_blocks
from buddy.budget.resolved import ResolvedBudget
from buddy.engine.tokenwise import why_no_drafts
from buddy.errors import BuddyError, PromptError
from buddy.generation.options import token_numbers
from buddy.inference import InferenceModel
from buddy.serving.client import EngineFacts, EngineState, Unavailable
from buddy.serving.control.protocol import Control, Gauges, NoControl
from buddy.serving.request import Deliver, Delta, Event, Failed, GenerationRequest
from buddy.serving.rows.batcher import Batcher
from buddy.serving.rows.grammar import GrammarMaker
from buddy.serving.rows.options import BatcherOptions
from buddy.serving.rows.row import Submitted

_LOG: Final = logging.getLogger(__name__)


class ServingThread:
    """Runs requests in a thread of its own; an `EngineClient`.

    Args:
        model: Its weights and its policy must not change from now on.
        tokenizer: The model's.
        name: Of the model, as clients say it.
        control: By default every row runs as deep as it wants.
        options: How requests run side by side.
        context: Tokens that prompt and answer may have together; None = what the model holds.

    Raises:
        BuddyError: An option is out of its range, or the policy cannot be made ready.
    """

    def __init__(
        self,
        model: InferenceModel,
        tokenizer: Any,
        name: str,
        *,
        control: Control | None = None,
        options: BatcherOptions | None = None,
        context: int | None = None,
    ) -> None:
        self._model = model
        self._control: Control = control or NoControl()
        self._pinned = model.policy.num_pinned
        model.policy.prepare_for((self._pinned,))
        ends = end_tokens(model)
        options = options or BatcherOptions()
        self._batcher = Batcher(model, tokenizer, self._control, options, ends)
        vocab = model.backbone.embedding.num_embeddings
        self._vocab = vocab
        self._grammars = GrammarMaker(tokenizer, vocab, ends)
        threading.Thread(target=self._grammars.prepare, name="buddy-grammar", daemon=True).start()
        max_queue = self._control.max_queue
        self._facts = EngineFacts(
            model=name,
            num_blocks=model.num_blocks,
            least_blocks=least_blocks(model.num_blocks, self._pinned),
            context=min(context or model.backbone.context, model.backbone.context),
            has_predictor=model.predictor is not None,
            means=None if model.ledger is None else model.ledger.range,
            most_answers=None if max_queue is None else options.rows + max_queue,
            engine=model.executor.describe(),
            why_no_drafts=why_no_drafts(model.policy),
            least_ms_per_token=self._control.least_ms_per_token,
        )
        self._numbers = count()
        self._changed = threading.Condition()
        self._delivery = threading.RLock()
        """Held while an event is handed over, so that nothing follows a `cancel`."""
        self._inbox: list[Submitted] = []
        self._open: dict[int, Deliver] = {}
        self._cancelled: list[int] = []
        self._state: EngineState = "ready"
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="buddy-engine", daemon=True)
        self._thread.start()

    @property
    def facts(self) -> EngineFacts:
        """What is known of the model."""
        return self._facts

    @property
    def state(self) -> EngineState:
        """Whether it takes requests."""
        return self._state

    @property
    def gauges(self) -> Gauges:
        """What it holds at this moment."""
        batcher = self._batcher
        return Gauges(
            running=len(batcher.rows),
            waiting=len(batcher.waiting) + len(self._inbox),
            kept_prefixes=batcher.pool.kept,
            kept_tokens=batcher.pool.kept_tokens,
            cache_bytes=batcher.pool.session.kv.num_bytes(),
            state=self._state,
        )

    def submit(self, request: GenerationRequest, deliver: Deliver) -> int:
        """Queue a request.

        Returns:
            Its number.

        Raises:
            Overloaded: It will not be taken now.
            Unavailable: Nothing is taken.
            BudgetError: Its budget cannot be spent, or its deadline not be kept.
            PromptError: Prompt and answer do not fit the context, or a token is unknown.
            GrammarError: Its grammar cannot be compiled.
        """
        self._check_state()
        self._check(request)
        grammar = None if request.grammar is None else self._grammars.compile(request.grammar)
        now_s = time.perf_counter()
        with self._changed:
            self._check_state()
            self._control.admit(request, self._batcher.queue(now_s, self._inbox))
            number = next(self._numbers)

            def guarded(event: Event) -> None:
                with self._delivery:
                    if number not in self._open:
                        return
                    del self._open[number]
                    deliver(event)
                    if isinstance(event, Delta):  # more will follow
                        self._open[number] = deliver

            self._open[number] = deliver
            self._inbox.append(Submitted(number, request, guarded, grammar, now_s))
            self._changed.notify()
        return number

    def cancel(self, number: int) -> None:
        """End a request; nothing more is delivered."""
        with self._delivery:
            self._open.pop(number, None)
        with self._changed:
            self._cancelled.append(number)
            self._changed.notify()

    def metrics(self) -> bytes:
        """Counters and gauges in Prometheus' text format."""
        return self._control.metrics(self.gauges)

    def drain(self) -> None:
        """Take nothing new; what is there is finished."""
        with self._changed:
            if self._state == "ready":
                self._state = "draining"

    def close(self, timeout_s: float) -> None:
        """End the engine; answers that are still under way fail."""
        self.drain()
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # What is refused

    def _check_state(self) -> None:
        if self._state != "ready":
            raise Unavailable(
                {
                    "draining": "the server is shutting down and takes nothing new",
                    "failed": "the engine has failed: the server must be started again",
                }[self._state]
            )

    def _check(self, request: GenerationRequest) -> None:
        context, tokens = self._facts.context, len(request.prompt)
        if not tokens:
            raise PromptError("a prompt has no tokens: expected at least one")
        if request.max_tokens < 0:
            raise PromptError(f"max_tokens must be at least 0, got {request.max_tokens}")
        if tokens + request.max_tokens > context:
            raise PromptError(
                f"a prompt of {tokens} tokens and an answer of up to {request.max_tokens} do not "
                f"fit the context of {context}: shorten the prompt, or ask for at most "
                f"{max(0, context - tokens)} tokens"
            )
        check_token_ids((*request.prompt, *request.sampling.logit_bias), self._vocab)
        self._check_budget(request.budget)

    def _check_budget(self, budget: ResolvedBudget) -> None:
        budget.check(self._model.limits)
        self._model.policy.check_spendable(budget.depths())

    # The thread

    def _serve(self) -> None:
        try:
            with torch.no_grad():
                while self._take_in():
                    self._batcher.step()
            message = "the server is shutting down"
        except BaseException as error:  # whatever it is, nobody may wait for ever
            _LOG.exception("the engine has failed")
            self._state = "failed"
            message = f"the engine has failed: {type(error).__name__}"
            if isinstance(error, BuddyError):
                message = f"the engine has failed: {error}"
        with self._changed:
            if self._state != "failed":
                self._state = "draining"
            for submitted in self._inbox:
                self._batcher.add(submitted)
            self._inbox = []
        self._batcher.fail(message)
        with self._delivery:  # whoever a failure found on the way from the queue to a row
            for deliver in self._open.values():
                deliver(Failed(message=message))
            self._open.clear()

    def _take_in(self) -> bool:
        """Wait for work; False where the engine is to end."""
        with self._changed:
            while not (
                self._inbox or self._cancelled or self._batcher.has_work or self._is_closing
            ):
                self._changed.wait()
            if self._is_closing:
                return False
            self._pass_on()
            return True

    def _pass_on(self) -> None:
        inbox, self._inbox = self._inbox, []
        cancelled, self._cancelled = self._cancelled, []
        for submitted in inbox:
            self._batcher.add(submitted)
        for number in cancelled:
            self._batcher.cancel(number)


def end_tokens(model: InferenceModel) -> Sequence[int]:
    """Tokens that end an answer, of the model's generation config; there may be several or none."""
    return token_numbers(model.generation_config.eos_token_id)
