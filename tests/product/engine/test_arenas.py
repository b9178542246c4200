"""The memory of captured decode steps: it is the live cache, and hardly more."""

from contextlib import contextmanager, nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.engine.executors import arena as arena_module
from buddy.engine.executors import graphs
from buddy.engine.executors.graphs import GraphDecoder
from buddy.engine.feed import Feed
from buddy.engine.run import run_step
from buddy.engine.step import Step
from tests.product.engine.test_host_waits import at_once
from tests.tiny import delete_blocks, tiny_model


def small_buddy():
    return BuddyForCausalLM(delete_blocks(tiny_model(), {2, 3, 4, 5}), engine="general")


class Server:
    """A session that sequences join and leave for ever, with captured decode steps.

    Attributes:
        ratios: After each pass, bytes of all arenas over those of the session's own cache.
    """

    def __init__(self):
        self.buddy = small_buddy()
        self.decoder = GraphDecoder(self.buddy.backbone, at_once)
        self.session = self.buddy.new_session(1, 4)
        self.ratios = []

    @torch.no_grad()
    def feed(self, numbers, count):
        backbone, policy = self.buddy.backbone, self.buddy.inference_policy()
        ids = torch.full((len(numbers) * count,), 3)
        step = Step(sequence_ids=numbers, feed=Feed(token_ids=ids, counts=(count,) * len(numbers)))
        out = run_step(backbone, policy, self.session, step, executor=self.decoder)
        self.ratios.append(self.arena_bytes() / self.cache_bytes())
        return out

    def cache_bytes(self):
        return sum(t.nbytes for t in (*self.session.kv._keys, *self.session.kv._values))

    def arena_bytes(self):
        arenas = self.decoder._arenas
        return sum(t.nbytes for arena in arenas for t in (*arena.keys, *arena.values))


def test_arenas_take_what_the_cache_takes_whoever_joins_and_leaves():
    draw, alive, joined, most = torch.Generator().manual_seed(0), [], 0, 0
    server = Server()
    while joined < 300:
        count = int(torch.randint(0, 20, (1,), generator=draw))
        gone = alive[1 : 1 + count]  # the first goes on and on
        server.session.leave(*gone)
        alive = [number for number in alive if number not in gone]
        new = [server.session.join() for _ in range(min(24, 2 + joined // 4) - len(alive))]
        alive, joined = alive + new, joined + len(new)
        most = max(most, len(alive))
        if new:
            server.feed(new, 2)
        server.feed(alive, 1)
    kv, longest = server.session.kv, server.session.sequences[alive[0]].length
    assert longest > 32
    assert kv.rows <= 1.5 * most == 36
    assert kv.capacity <= 2 * longest
    assert max(server.ratios) <= 1.0 == server.ratios[-1], "one arena, and it is the cache"


class Decodes:
    """A model whose decode steps are captured.

    Args:
        capture: Makes a replay of a piece of work.
    """

    def __init__(self, capture=at_once):
        self.buddy = small_buddy()
        self.decoder = GraphDecoder(self.buddy.backbone, capture)
        self.buddy.executor.fast_path = lambda: self.decoder

    @torch.no_grad()
    def begin(self, rows, slots):
        """A session of so many rows and slots that has decoded a token."""
        session = self.buddy.new_session(rows, slots)
        for _ in range(2):
            self.buddy(torch.full((rows, 1), 3), cache=session)
        return session

    @property
    def rows(self):
        return [len(arena.tokens) for arena in self.decoder._arenas]


def test_room_is_made_for_as_many_rows_as_are_asked_for_and_for_some_where_they_join():
    session = small_buddy().new_session(16, 4)
    session.kv.reserve(17, 0)
    assert session.kv.rows == 17
    for _ in range(18):
        session.join()
    assert session.kv.rows == 24


def test_sessions_of_many_lengths_have_few_arenas():
    decodes = Decodes()
    for slots in (2, 3, 5, 6, 7, 10, 13, 16, 17, 20, 31):
        decodes.begin(1, slots)
    lengths = [arena.keys[0].shape[2] for arena in decodes.decoder._arenas]
    assert lengths == [2, 3, 6, 8, 12, 16, 24, 32]


def test_arenas_that_nobody_has_are_few():
    decodes = Decodes()
    alive = decodes.begin(1, 4)
    for rows in range(2, 14):
        decodes.begin(rows, 4)
    assert decodes.rows == [1, *range(5, 13), 13], "one in use, eight, and the last"
    del alive


def test_arenas_that_nobody_has_take_at_most_half_of_what_is_in_use(monkeypatch):
    monkeypatch.setattr(graphs, "_IDLE_BYTES", 0)
    decodes, rows = Decodes(), []
    for number in (4, 3, 4, 1, 4):
        decodes.begin(number, 8)
        rows.append(decodes.rows)
    assert rows == [[4], [3], [4], [1], [1, 4]]


class Streams:
    """In the place of torch's streams and graphs: notes each graph's pool, and where work runs."""

    def __init__(self, monkeypatch):
        self.pools, self.now = [], None
        graphs._capture_stream.cache_clear()
        monkeypatch.setattr("torch.cuda.device", nullcontext)
        monkeypatch.setattr("torch.cuda.graph", self.capturing)
        monkeypatch.setattr("torch.cuda.stream", self.on)
        monkeypatch.setattr("torch.cuda.Stream", lambda device: Mock(device=device))
        monkeypatch.setattr("torch.cuda.current_stream", Mock)
        monkeypatch.setattr("torch.cuda.CUDAGraph", Mock)
        monkeypatch.setattr("torch.cuda.graph_pool_handle", iter("ab").__next__)

    @contextmanager
    def on(self, stream):
        self.now = stream
        yield
        self.now = None

    def capturing(self, graph, pool, stream):
        self.pools.append(pool)
        return self.on(stream)


@pytest.fixture
def streams(monkeypatch):
    yield Streams(monkeypatch)
    graphs._capture_stream.cache_clear()


def test_the_graphs_of_an_arena_share_a_pool_and_all_share_a_stream(monkeypatch, streams):
    decodes, work_on = Decodes(capture=None), []
    run_block = decodes.buddy.backbone.run_block

    def noted(*parts):
        work_on.append(streams.now)
        return run_block(*parts)

    monkeypatch.setattr(decodes.buddy.backbone, "run_block", noted)
    alive = [decodes.begin(1, 4) for _ in range(2)]
    half = 4  # two blocks, what comes before them, and the output projection
    assert streams.pools == ["a"] * half + ["b"] * half
    captured = [on for on in work_on if on is not None]
    assert len(captured) == 2 * 2 * 3, "two warm-ups and the capture"
    assert len(set(map(id, captured))) == 1
    del alive


def test_what_is_captured_on_a_device_runs_on_a_stream_of_that_device(streams):
    devices, ran_on = [torch.device("cuda", at) for at in (0, 1, 0)], []
    for device in devices:
        graphs.capture_cuda(device, None, lambda: ran_on.append(streams.now.device))
    assert ran_on == [device for device in devices for _ in range(3)]


class Read(TorchFunctionMode):
    """Counts the keys that attention is given, rows times slots, by call."""

    def __init__(self):
        super().__init__()
        self.keys = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.keys.append(args[1].shape[0] * args[1].shape[2])
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_step_reads_at_most_twice_the_slots_that_live(monkeypatch):
    monkeypatch.setattr(arena_module, "_LEAST_SLOTS", 1)
    decodes, general, reads = Decodes(), small_buddy(), []
    session, expected = (buddy.new_session(2, 48) for buddy in (decodes.buddy, general))
    tokens = torch.tensor([[5, 9, 3], [7, 4, 8]])
    for _ in range(20):
        logits = general(tokens, cache=expected).logits
        with Read() as read:
            made = decodes.buddy(tokens, cache=session).logits
        assert_close(made, logits, atol=1e-5, rtol=1e-5)
        tokens = logits[:, -1:].argmax(-1)
        reads.append(read.keys)
    for step, counts in enumerate(reads[1:]):
        assert len(counts) >= 2, "one call of attention for each block"
        assert max(counts) <= 2 * (2 * (4 + step))
