"""A fill, a join or a step that is cut short at any call leaves the session as it was."""

import contextlib
import shutil
import sys
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError
from torch.testing import assert_close

import buddy
from buddy import BuddyForCausalLM
from buddy.depth.plan import DepthPlan
from buddy.engine.executors.native.decoder import NativeDecoder
from tests.product.engine.schedules import Schedule
from tests.tiny import NUM_BLOCKS, VOCAB, every_kv_policy, random_ids, tiny_buddy, tiny_model

# Raised while a generator is thrown away, an error cannot be passed on; Python warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

HERE = str(Path(buddy.__file__).parent)
MODEL = BuddyForCausalLM(tiny_model())


class CutShort:
    """Raises at the n-th call out of Buddy's own code; counts them where n is 0.

    Between taking and giving back a lock Python itself lets no signal in.
    """

    def __init__(self, error, at=0):
        self.error, self.at, self.count = error, at, 0

    def __call__(self, frame, event, arg):
        is_lock = event == "c_call" and arg.__name__ in ("__enter__", "__exit__")
        if (
            event in ("call", "c_call")
            and not is_lock
            and frame.f_code.co_filename.startswith(HERE)
        ):
            self.count += 1
            if self.count == self.at:
                raise self.error

    def run(self, work):
        sys.setprofile(self)
        try:
            return work()
        finally:
            sys.setprofile(None)


def drawn(schedule, counts):
    """Tokens and plans for a step of these sequences."""
    lanes = sum(counts)
    ids = torch.randint(2, VOCAB, (lanes,), generator=schedule.draw)
    return ids, DepthPlan(torch.rand(lanes, NUM_BLOCKS, generator=schedule.draw) < 0.5)


def begun(kv_policy, executor):
    """A session in which three sequences have holes."""
    schedule = Schedule(MODEL, kv_policy, seed=11, executors=(executor,))
    numbers = [schedule.session.join() for _ in range(3)]
    for counts in ([5, 2, 7], [1, 1, 1], [2, 1, 1]):
        schedule.feed(numbers, counts, *drawn(schedule, counts), executor)
    return schedule, numbers


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("engine", ["general", "native"])
@every_kv_policy
@torch.no_grad()
def test_a_step_that_is_cut_short_at_any_call_is_forgotten(kv_policy, engine, error):
    if engine == "native" and shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    executor = NativeDecoder(MODEL.backbone) if engine == "native" else None
    schedule, numbers = begun(kv_policy, executor)
    twin, _ = begun(kv_policy, executor)
    counts = [1, 3, 1]
    step = drawn(schedule, counts)
    assert all(
        map(torch.equal, (step[0], step[1].mask), ((t := drawn(twin, counts))[0], t[1].mask))
    )
    counter = CutShort(error)
    expected = counter.run(lambda: twin.feed(numbers, counts, *step, executor))
    assert counter.count > 100
    cut = 0
    for at in range(1, counter.count, max(1, counter.count // 30)):
        before = schedule.session.state
        try:
            CutShort(error, at).run(lambda: schedule.feed(numbers, counts, *step, executor))
        except (error, TypeCheckError):  # a check of shapes says so of what is raised within it
            # Cut after the step was committed, it has happened; it is taken back to be cut again.
            cut += 1
        schedule.session.rewind(before)
        assert schedule.session.state is before
    assert cut > 15
    for _ in range(2):
        made = schedule.feed(numbers, counts, *step, executor)
        assert_close(made.hidden, expected.hidden, atol=1e-5, rtol=1e-5)
        step = drawn(twin, counts)
        expected = twin.feed(numbers, counts, *step, executor)


@every_kv_policy
@torch.no_grad()
def test_what_a_cut_step_has_left_is_cleared_though_nobody_took_it_back(kv_policy):
    schedule, numbers = begun(kv_policy, None)
    twin, _ = begun(kv_policy, None)
    counts = [2, 1, 2]
    step = drawn(schedule, counts)
    drawn(twin, counts)
    everything = DepthPlan(torch.ones(5, NUM_BLOCKS, dtype=torch.bool))
    counter = CutShort(KeyboardInterrupt())
    counter.run(lambda: twin.feed(numbers, counts, *step))
    twin, _ = begun(kv_policy, None)
    expected = twin.feed(numbers, counts, step[0], everything)
    for at in range(counter.count // 5, counter.count - 20, counter.count // 5):
        before = schedule.session.state
        with pytest.raises(KeyboardInterrupt):
            CutShort(KeyboardInterrupt(), at).run(lambda: schedule.feed(numbers, counts, *step))
        assert schedule.session.state is before
    made = schedule.feed(numbers, counts, step[0], everything)
    assert_close(made.hidden, expected.hidden, atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_a_join_that_is_cut_short_has_happened_or_has_not():
    schedule, numbers = begun("lazy", None)
    counter = CutShort(KeyboardInterrupt())
    counter.run(schedule.session.join)
    for at in range(1, counter.count + 1):
        before = set(schedule.session.sequences)
        with contextlib.suppress(KeyboardInterrupt):
            CutShort(KeyboardInterrupt(), at).run(schedule.session.join)
        now = set(schedule.session.sequences)
        assert before <= now
        assert len(now - before) <= 1
        rows = [sequence.row for sequence in schedule.session.sequences.values()]
        assert len(set(rows)) == len(rows)
    assert set(numbers) <= set(schedule.session.sequences)


@pytest.mark.parametrize("engine", ["general", "auto"])
@torch.no_grad()
def test_forward_and_its_session_survive_being_cut_short(engine):
    model = tiny_buddy(summary="ema", ema_decay=0.5, engine=engine)
    ids, new = random_ids(2, 6), random_ids(2, 3, seed=1)
    options = {"budget": ["3 blocks", "5 blocks"]}
    clean = model(ids, **options).cache
    session = model(ids, **options).cache
    for step in range(3):
        token = new[:, step : step + 1]
        counter = CutShort(KeyboardInterrupt())
        expected = counter.run(lambda t=token: model(t, cache=clean, **options))
        for at in range(1, counter.count, max(1, counter.count // 25)):
            before = session.state
            with contextlib.suppress(KeyboardInterrupt):
                CutShort(KeyboardInterrupt(), at).run(
                    lambda t=token: model(t, cache=session, **options)
                )
            session.rewind(before)
        made = model(token, cache=session, **options)
        assert torch.equal(made.plan.mask, expected.plan.mask)
        assert_close(made.logits, expected.logits, atol=1e-6, rtol=1e-6)
