"""Blocks under plans equal each request alone, for any plans, stages and padding."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from buddy_vllm.batch import KEY, Batch, row_of
from buddy_vllm.blocks import run_blocks

HIDDEN, BLOCKS = 8, 6


class Attention:
    """Tells layers which requests they attend for."""

    def __init__(self, counts):
        self.counts = self.whole = counts

    @contextmanager
    def only(self, layer, group):
        self.counts = self.whole[group.requests]
        yield
        self.counts = self.whole


class Layer:
    """A layer like vLLM's, with the residual beside what is still to be added.

    Tokens of a request see each other.

    It writes into what it is given, as vLLM's fused norm does.
    """

    def __init__(self, seed, attention):
        generator = torch.Generator().manual_seed(int(seed))
        self.weight = torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN
        self.attention = attention

    def __call__(self, positions, hidden, residual):
        if residual is None:
            residual = hidden
        else:
            residual += hidden
        spans = torch.split(residual, self.attention.counts.tolist())
        seen = torch.cat([span.cumsum(0) for span in spans])
        return torch.tanh(seen + positions[:, None]) @ self.weight, residual


def run(runs, counts, hidden, positions, *, stages=((0, BLOCKS),)):
    attention = Attention(counts)
    layers = [Layer(seed, attention) for seed in range(BLOCKS)]
    hidden, residual, executed = hidden.clone(), None, 0
    for start, end in stages:
        batch = Batch(runs, counts, torch.device("cpu"), attention)
        stack = SimpleNamespace(layers=layers, start_layer=start, end_layer=end)
        hidden, residual = run_blocks(stack, positions, hidden, residual, batch)
        executed = executed + batch.executed
    return hidden + residual, executed


def drawn(seed, requests):
    draw = np.random.default_rng(seed)
    runs = draw.random((requests, BLOCKS)) < draw.choice([0.2, 0.5, 0.8])
    counts = draw.integers(1, 5, requests)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(int(counts.sum()), HIDDEN, generator=generator)
    positions = torch.cat([torch.arange(count) for count in counts.tolist()])
    return runs, counts, hidden, positions


@pytest.mark.parametrize("seed", range(30))
def test_a_mixed_batch_equals_each_request_alone(seed):
    runs, counts, hidden, positions = drawn(seed, 1 + seed % 5)
    together, executed = run(runs, counts, hidden, positions)
    assert executed.tolist() == (runs.sum(1) * counts).tolist()
    at = 0
    for row, count in zip(runs, counts, strict=True):
        span = slice(at, at + count)
        layers = [Layer(block, Attention(np.array([count]))) for block in np.flatnonzero(row)]
        stream = hidden[span].clone()
        for layer in layers:
            added, _ = layer(positions[span], stream.clone(), None)
            stream = stream + added
        # 1e-5: a residual and what is added to it are summed in another order.
        torch.testing.assert_close(together[span], stream, atol=1e-5, rtol=1e-5)
        at += count


@pytest.mark.parametrize("stages", [((0, 3), (3, 6)), ((0, 1), (1, 5), (5, 6))])
@pytest.mark.parametrize("seed", range(6))
def test_pipeline_stages_equal_one(seed, stages):
    given = drawn(seed, 4)
    whole, executed = run(*given)
    parts, counted = run(*given, stages=stages)
    assert torch.equal(whole, parts)
    assert counted.tolist() == executed.tolist()


def test_rows_of_padding_are_left_alone():
    runs, counts, hidden, positions = drawn(3, 3)
    runs[:, 0] = [True, False, True]
    padded = torch.cat([hidden, torch.full((2, HIDDEN), 7.0)])
    places = torch.cat([positions, torch.zeros(2, dtype=torch.long)])
    some = runs.copy()
    some[0] = ~some[1]  # no block is run by all, so no padding is computed
    some[2] = some[1]
    alone, _ = run(some, counts, hidden, positions)
    both, _ = run(some, counts, padded, places)
    assert torch.equal(both[:-2], alone)
    assert torch.equal(both[-2:], padded[-2:])


def test_requests_that_agree_are_not_gathered():
    counts = np.array([2, 3])
    runs = np.ones((2, BLOCKS), np.bool_)
    runs[:, 2] = False
    runs[1, 4] = False
    batch = Batch(runs, counts, torch.device("cpu"), Attention(counts))
    assert [batch.group(block) is None for block in (0, 1, 3, 5)] == [True] * 4
    assert batch.is_idle(2)
    assert batch.group(4).requests.tolist() == [0]
    assert batch.group(4).tokens.tolist() == [0, 1]
    assert batch.group(4) is batch.group(4)
    assert not batch.is_whole


def test_requests_that_all_run_everything_are_vllms_own_matter():
    counts = np.array([2, 3])
    batch = Batch(np.ones((2, BLOCKS), np.bool_), counts, torch.device("cpu"), Attention(counts))
    assert batch.is_whole
    batch.count(slice(1, 4))
    assert batch.executed.tolist() == [6, 9]


@pytest.mark.parametrize(
    "blocks",
    [None, [], "x", 5, {"a": 1}, [0, 99], [-1], [0, "1"], [True], [0.0], [[0]], [2**70]],
)
def test_a_worker_runs_full_depth_where_a_plan_cannot_be_read(blocks):
    assert row_of({KEY: blocks}, BLOCKS).all()
    assert row_of({}, BLOCKS).all()
    assert row_of(None, BLOCKS).all()


def test_a_plan_is_a_row():
    assert row_of({KEY: [0, 2, 5]}, BLOCKS).tolist() == [True, False, True, False, False, True]
