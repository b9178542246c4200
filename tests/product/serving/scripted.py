"""An engine that says words by a rule, so that what HTTP makes of it can be told beforehand.

It keeps the contract of `EngineClient`: a thread of its own delivers, requests queue, cancels hold
at the next step.
"""

import threading
import time

import numpy as np

from buddy.errors import BudgetError
from buddy.serving.client import EngineFacts, Overloaded, Unavailable
from buddy.serving.request import Delta, Failed, Finished, PromptScores, TokenLogprobs, Usage

NUM_BLOCKS = 30
AUTO_BLOCKS = 18
DEADLINE_BLOCKS = 20


def token_at(request, step):
    """The token id of an answer's step."""
    return 3 + (sum(request.prompt) + 7 * step + (request.sampling.seed or 0)) % 90


def scores_of(request):
    """Log-probabilities of a prompt: each token is the best, the next id the second ..."""
    tokens, count = np.array(request.prompt[1:]), request.prompt_logprobs
    return PromptScores(
        logprobs=np.full(len(tokens), -0.5),
        ranks=np.ones(len(tokens), int),
        top_tokens=tokens[:, None] + np.arange(count),
        top_logprobs=np.tile(-0.5 - np.arange(count), (len(tokens), 1)),
    )


def blocks_of(budget):
    """Blocks that a token of the answer runs."""
    if budget.is_contract:
        return budget.most
    most = {"auto": AUTO_BLOCKS, "deadline": DEADLINE_BLOCKS}.get(budget.kind, budget.most)
    return max(budget.least, min(budget.most, most))


class ScriptedEngine:
    """Says `token_at` of each step.

    Args:
        decode: From a token id to its text.
        step_s: Time of a step.
        max_rows: Answers at once.
        max_queue: Requests that may wait.
    """

    def __init__(
        self, decode, *, step_s=0.0, max_rows=32, max_queue=256, has_predictor=True, means=(15, 30)
    ):
        self.facts = EngineFacts(
            model="tiny",
            num_blocks=NUM_BLOCKS,
            least_blocks=3,
            context=256,
            has_predictor=has_predictor,
            means=means,
            most_answers=max(1, max_rows + max_queue),
            engine="scripted",
            least_ms_per_token=2.0,
        )
        self.state = "ready"
        self.seen, self.cancelled, self.finished = [], set(), set()
        self._decode, self._step_s = decode, step_s
        self._max_rows, self._max_queue = max_rows, max_queue
        self._jobs, self._lock = {}, threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def in_flight(self):
        """Requests that wait or run."""
        with self._lock:
            return len(self._jobs)

    def submit(self, request, deliver):
        with self._lock:
            if self.state != "ready":
                raise Unavailable(f"the engine is {self.state}")
            if request.budget.has_deadline and request.budget.ms_per_token < 2:
                raise BudgetError(
                    f"{request.budget.ms_per_token:g} ms a token is out of reach: this machine "
                    "needs at least 2"
                )
            if len(self._jobs) >= self._max_rows + self._max_queue:
                raise Overloaded("the queue is full", retry_after_s=3)
            self.seen.append(request)
            number = len(self.seen)
            self._jobs[number] = [request, deliver, 0, ""]
            self._lock.notify()
        return number

    def cancel(self, number):
        with self._lock:
            if self._jobs.pop(number, None) is not None:
                self.cancelled.add(number)

    def metrics(self):
        return b"# TYPE buddy_requests gauge\nbuddy_requests %d\n" % self.in_flight

    def drain(self):
        if self.state == "ready":
            self.state = "draining"

    def close(self, timeout_s):
        with self._lock:
            self.state = "failed"
            self._lock.notify()
        self._thread.join(timeout_s)

    def fail(self):
        """Behave as if the thread's work had died."""
        with self._lock:
            self.state = "failed"
            jobs = list(self._jobs.values())
            self._jobs.clear()
        for _, deliver, _, _ in jobs:
            deliver(Failed(message="the engine has failed"))

    def _run(self):
        while True:
            with self._lock:
                while not self._jobs and self.state != "failed":
                    self._lock.wait(0.1)
                if self.state == "failed":
                    return
                running = list(self._jobs.items())[: self._max_rows]
            time.sleep(self._step_s)
            for number, job in running:
                self._step(number, job)

    def _step(self, number, job):
        request, deliver, step, before = job
        token, blocks = token_at(request, step), blocks_of(request.budget)
        text, reason = self._decode(token) + " ", None
        for stop in request.stop:
            if stop in before + text:
                text, reason = (before + text).split(stop)[0][len(before) :], "stop"
        runs = np.zeros(NUM_BLOCKS, bool)
        runs[np.random.default_rng(step).permutation(NUM_BLOCKS)[:blocks]] = True
        logprobs = ()
        if request.top_logprobs is not None:
            top = tuple((token + i, -0.5 - i) for i in range(request.top_logprobs))
            logprobs = (TokenLogprobs(token=token, logprob=-0.5, top=top, offset=len(before)),)
        events = [Delta(text=text, tokens=(token,), logprobs=logprobs, runs=(runs,))]
        job[2:] = step + 1, before + text
        if request.max_tokens == 0:
            events, job[2:], reason = [], (0, ""), "length"
        if step == 0 and request.prompt_logprobs is not None:
            events.insert(0, Delta(text="", tokens=(), prompt=scores_of(request)))
        if reason is None and step + 1 == request.max_tokens:
            reason = "length"
        if reason is not None:
            events.append(Finished(reason=reason, usage=self._usage(request, job[2], blocks)))
        with self._lock:
            if number not in self._jobs:
                return
            for event in events:
                deliver(event)
            if reason is not None:
                del self._jobs[number]
                self.finished.add(number)

    def _usage(self, request, tokens, blocks):
        return Usage(
            prompt_tokens=len(request.prompt),
            cached_tokens=0,
            completion_tokens=tokens,
            blocks_executed=blocks * (len(request.prompt) + tokens - 1),
            budget_blocks=blocks,
            blocks_per_token=float(blocks),
            distinct_plans=tokens,
            source=request.budget.kind,
            lowered_from=None,
        )
