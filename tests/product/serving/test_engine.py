"""The engine's thread: what other threads may do to it, and what it survives."""

import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

from buddy import BuddyForCausalLM
from buddy.engine.state import cache
from buddy.errors import BudgetError, PromptError
from buddy.serving.client import EngineClient, Overloaded, Unavailable
from buddy.serving.control.protocol import NoControl
from buddy.serving.request import Grammar
from buddy.serving.rows import passes
from buddy.serving.rows.engine import ServingThread
from buddy.serving.rows.grammar import GrammarError
from buddy.serving.rows.options import BatcherOptions
from tests.budgets import auto, deadline, default, fixed
from tests.product.serving.made import Told, alone, byte_buddy, byte_tokenizer, prompts, request
from tests.tiny import CONFIGS


class Heard(Told):
    """Collects events of another thread."""

    def __init__(self):
        super().__init__()
        self.over = threading.Event()

    def __call__(self, event):
        super().__call__(event)
        if self.ended:
            self.over.set()

    def wait(self):
        assert self.over.wait(20), "no end came"
        return self


@pytest.fixture
def made():
    engines = []

    def make(buddy=None, **more):
        options = {"rows": 4, "least_shared": 2} | more.pop("options", {})
        engine = ServingThread(
            buddy or byte_buddy("static:2,3,4,1"),
            byte_tokenizer(),
            "tiny",
            options=BatcherOptions(**options),
            **more,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close(10.0)
        assert not engine._thread.is_alive()


def ask(engine, asked):
    heard = Heard()
    engine.submit(asked, heard)
    return heard


def eventually(holds):
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


def test_requests_of_many_threads(made):
    buddy = byte_buddy("static:2,3,4,1")
    engine = made(buddy)
    assert isinstance(engine, EngineClient)
    assert engine.state == "ready"
    assert (engine.facts.num_blocks, engine.facts.context) == (6, 128)
    asked = [request(p, budget=3 + at % 3) for at, p in enumerate(prompts(12, 2))]
    heard = {}

    def client(at):
        heard[at] = ask(engine, asked[at]).wait()

    threads = [threading.Thread(target=client, args=(at,)) for at in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at, wanted in enumerate(asked):
        assert heard[at].tokens == alone(buddy, wanted)
    eventually(lambda: engine.gauges.running == 0)
    assert engine.gauges.waiting == 0
    assert not engine._open
    assert b"buddy_requests_running 0" in engine.metrics()


@pytest.mark.parametrize("cut", [0, 3, 8])
def test_nothing_follows_a_cancel(made, cut):
    engine = made(control=NoControl(prompt_tokens=4), options={"rows": 2})
    heard = [Heard() for _ in range(6)]
    numbers = [
        engine.submit(request(p, max_tokens=90), listener)
        for p, listener in zip(prompts(6, 3, 20, 20), heard, strict=True)
    ]
    eventually(lambda: engine._batcher.steps >= cut)
    for number in numbers:
        engine.cancel(number)
    known = [len(listener.events) for listener in heard]
    step = engine._batcher.steps
    eventually(lambda: engine.gauges.running == engine.gauges.waiting == 0)
    assert engine._batcher.steps <= step + 2
    assert [len(listener.events) for listener in heard] == known
    engine.cancel(numbers[0])
    engine.cancel(10**6)
    again = request([1, 2])
    assert ask(engine, again).wait().tokens == alone(engine._model, again)


def test_an_engine_that_can_serve_nobody_fails_everyone_and_says_so(made, monkeypatch):
    engine = made(options={"rows": 2})
    heard = [ask(engine, request(p, max_tokens=90)) for p in prompts(5, 3)]
    eventually(lambda: heard[0].tokens)

    def breaks(*parts, **more):
        raise RuntimeError("broken")

    monkeypatch.setattr(passes, "run_step", breaks)
    said = [listener.wait().failed for listener in heard]
    assert sum("this answer cannot be made: RuntimeError" in line for line in said) == 1
    assert sum("the engine has failed: RuntimeError" in line for line in said) == 4
    eventually(lambda: engine.state == "failed")
    with pytest.raises(Unavailable, match="failed"):
        engine.submit(request([1]), Heard())
    assert engine.gauges.running == engine.gauges.waiting == 0


class PanicException(BaseException):  # as Rust's are called, which are no `Exception`
    pass


@pytest.mark.parametrize("error", [PanicException("a regex backtracks"), SystemExit(3)])
def test_whatever_is_raised_requests_end_and_the_engine_is_not_ready(made, error):
    class Breaks(NoControl):
        def decide(self, rows, queue):
            raise error

    engine = made(control=Breaks())
    heard = [ask(engine, request(p, max_tokens=90)) for p in prompts(2, 3)]
    assert all("the engine has failed" in listener.wait().failed for listener in heard)
    eventually(lambda: engine.state == "failed")


def test_who_is_lost_between_the_queue_and_a_row_is_told_too(made, monkeypatch):
    engine = made()

    def breaks(*submitted):
        raise SystemExit(3)

    monkeypatch.setattr("buddy.serving.rows.batcher.make_row", breaks)
    assert "the engine has failed" in ask(engine, request([1])).wait().failed


@pytest.mark.parametrize("place", [0, 4], ids=["before a row", "within the answer"])
def test_a_decoder_that_panics_ends_its_own_request_alone(made, place):
    engine = made()
    decode = engine._batcher._tokenizer.backend_tokenizer.decode
    good, bad = (request([at], max_tokens=20, continues=True) for at in (3, 7))
    wanted = alone(engine._model, good)
    token = (7, *alone(engine._model, bad))[place]
    assert token not in (3, *wanted)

    class Tokenizer:
        @property
        def backend_tokenizer(self):
            return self

        def get_added_tokens_decoder(self):
            return {}

        def decode(self, ids, **more):
            if token in ids:
                raise PanicException("Onig: Regex search error")
            return decode(ids, **more)

    engine._batcher._tokenizer = Tokenizer()
    heard = ask(engine, good), ask(engine, bad)
    assert "this answer cannot be made: PanicException" in heard[1].wait().failed
    assert heard[0].wait().tokens == wanted
    assert engine.state == "ready"


def longrope_phi3():
    """Phi-3 whose angles change at 20 tokens, of a context of 64."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 20,
        "short_factor": [1, 1.1, 1.2, 1.3],
        "long_factor": [2, 3, 4, 5],
    }
    torch.manual_seed(0)
    config = Phi3Config(
        **{**CONFIGS["phi3"].to_dict(), "vocab_size": 264, "sliding_window": None},
    )
    config.rope_parameters, config.original_max_position_embeddings = rope, 20
    return BuddyForCausalLM(AutoModelForCausalLM.from_config(config).eval(), policy="static:2,3,4")


def test_an_answer_beyond_the_angles_of_longrope_is_refused_and_others_are_served(made):
    engine = made(longrope_phi3())
    assert engine.facts.context == 20
    other = ask(engine, request([1, 2, 3], max_tokens=12))
    with pytest.raises(PromptError, match="context of 20"):
        engine.submit(request(range(65, 75), max_tokens=20), Heard())
    assert len(ask(engine, request(range(65, 75), max_tokens=10)).wait().tokens) == 10
    assert len(other.wait().tokens) == 12
    assert engine.state == "ready"


def no_memory(*_):
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize(
    "changed", [{"_grown": no_memory}, {"free_bytes": lambda: 5.0, "_WORTH_ASKING": 10_000}]
)
def test_a_prompt_that_finds_no_memory_ends_alone(made, monkeypatch, changed):
    """Beside an answer under way the cache cannot grow for a long prompt; it goes on without."""
    engine = made(control=NoControl(prompt_tokens=16), options={"slots": 32})
    wanted = request(prompts(1, 3, 8, 8)[0], max_tokens=20)
    for name, value in changed.items():
        monkeypatch.setattr(cache, name, value)
    stream = ask(engine, wanted)
    heard = ask(engine, request(prompts(1, 4, 90, 90)[0]))
    assert "not enough memory for this request" in heard.wait().failed
    assert stream.wait().tokens == alone(engine._model, wanted)
    assert engine.state == "ready"
    monkeypatch.undo()
    again = request(prompts(1, 4, 90, 90)[0])
    assert ask(engine, again).wait().tokens == alone(engine._model, again)


def test_drained_it_takes_nothing_new_and_ends_what_is_there(made):
    engine = made()
    heard = ask(engine, request([1, 2], max_tokens=60))
    engine.drain()
    with pytest.raises(Unavailable, match="takes nothing new"):
        engine.submit(request([1]), Heard())
    assert len(heard.wait().tokens) == 60
    assert engine.state == "draining"


def test_closed_it_fails_who_is_still_there(made):
    engine = made(options={"rows": 1})
    heard = [ask(engine, request(p, max_tokens=100)) for p in prompts(3, 4)]
    eventually(lambda: heard[0].tokens)
    engine.close(10.0)
    assert [listener.wait().failed for listener in heard] == ["the server is shutting down"] * 3


def test_control_refuses_who_is_too_many(made):
    class Two(NoControl):
        def admit(self, asked, queue):
            if queue.size + queue.running >= 2:
                raise Overloaded("full", retry_after_s=3)

    engine = made(control=Two())
    first = [ask(engine, request(p, max_tokens=100)) for p in prompts(2, 1)]
    with pytest.raises(Overloaded) as caught:
        ask(engine, request([3]))
    assert caught.value.retry_after_s == 3
    for listener in first:
        listener.wait()
    eventually(lambda: engine.gauges.running == 0)
    ask(engine, request([3])).wait()


REFUSED = [
    (request([]), PromptError, "no tokens"),
    (request([1], max_tokens=-1), PromptError, "at least 0"),
    (request([1] * 100, max_tokens=29), PromptError, "at most 28"),
    (request([264]), PromptError, "264 is not one of"),
    (request([1], logit_bias={-1: 1.0}), PromptError, "-1 is not one of"),
    (request([1], budget=1), BudgetError, "2 of the 6 blocks always run"),
    (request([1], budget=fixed(prefill=4, decode=7)), BudgetError, "cannot be spent"),
    (request([1], budget=default(least=0, most=4)), BudgetError, "cannot be spent"),
    (request([1], budget=default(least=5, most=4)), BudgetError, "must not"),
    (request([1], budget=deadline(ms_per_token=3.0, least=2, most=9)), BudgetError, "spent"),
    (request([1], budget=auto(least=2, most=4)), BudgetError, "needs a trained"),
    (request([1], grammar=Grammar(schema="{")), GrammarError, "no JSON"),
]


def test_what_cannot_be_is_refused_before_it_waits(made):
    engine = made()
    for asked, error, said in REFUSED:
        heard = Heard()
        with pytest.raises(error, match=said):
            engine.submit(asked, heard)
        assert not heard.events
        assert engine.gauges.waiting == 0
    longest = request([1] * 100, max_tokens=28)
    assert len(ask(engine, longest).wait().tokens) == 28
