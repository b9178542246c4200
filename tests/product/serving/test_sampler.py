"""Tokens are chosen as transformers' processors would, each row by itself."""

import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from buddy.serving.request import Sampling
from buddy.serving.rows import sampler
from buddy.serving.rows.grammar import GrammarState
from buddy.serving.rows.sampler import Picker, nucleus, pick, spread
from tests.pretend import PretendDevice

V = 50
SAMPLINGS = [
    Sampling(temperature=0.7),
    Sampling(temperature=1.3, top_k=5),
    Sampling(top_p=0.6),
    Sampling(top_p=0.95, top_k=20, temperature=0.5),
    Sampling(min_p=0.2),
    Sampling(top_k=9, top_p=0.8, min_p=0.1, temperature=2.0),
    Sampling(top_p=1e-9),
    Sampling(top_k=1),
    Sampling(top_k=V + 7, top_p=0.9),
]


def logits_of(rows, seed=0):
    return 3 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def reference(logits, sampling):
    """Probabilities by transformers' processors."""
    made = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        made.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        made.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        made.append(MinPLogitsWarper(sampling.min_p))
    return made(None, logits[None])[0].softmax(-1)


def ours(logits, sampling, width=None):
    cooled = sampler._cooled(logits[None], [sampling])
    if not sampling.top_k and sampling.top_p >= 1:
        weights = spread(cooled, [sampling])[0]
    else:
        found, ids, (holds,) = nucleus(cooled, [sampling], width or V)
        if not holds:
            return None
        weights = torch.zeros(V, dtype=torch.float64).scatter(0, ids[0], found[0])
    return (weights / weights.sum()).float()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_what_may_be_drawn_is_what_transformers_leaves(sampling):
    for row in logits_of(20):
        expected = reference(row, sampling)
        assert_close(ours(row, sampling), expected, atol=1e-6, rtol=1e-5)
        narrow = ours(row, sampling, width=12)
        if narrow is not None:
            assert_close(narrow, expected, atol=1e-6, rtol=1e-5)


def test_a_nucleus_that_is_wider_than_the_candidates_is_still_right(monkeypatch):
    monkeypatch.setattr(sampler, "_CANDIDATES", 4)
    flat = logits_of(3) / 10
    for sampling in (
        Sampling(top_p=0.9, seed=3),
        Sampling(top_k=30, seed=3),
        Sampling(top_p=0.05, seed=3),
    ):
        wide = [draws(flat[at], sampling, 150) for at in range(3)]
        for row, drawn in zip(flat, wide, strict=True):
            expected = reference(row, sampling)
            assert all(expected[token] > 0 for token in drawn)
            counts = torch.bincount(torch.tensor(drawn), minlength=V) / len(drawn)
            assert float((counts - expected).abs().sum()) < 0.7


def test_a_seed_draws_what_it_drew_when_rows_were_drawn_one_by_one():
    """The numbers of an earlier commit: a text with a seed must not change."""
    pickers = [Picker(replace(each, seed=at), [at, 9]) for at, each in enumerate(KINDS)]
    drawn = []
    for step in range(4):
        found = [picked.token for picked in pick(logits_of(len(KINDS), seed=step), pickers)]
        for picker, token in zip(pickers, found, strict=True):
            picker.take(token)
        drawn.append(found)
    assert drawn == DRAWN


KINDS = [
    *SAMPLINGS,
    Sampling(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
    Sampling(logit_bias={3: 2.0, 4: -1.0}, top_p=0.8),
    Sampling(temperature=0.0, repetition_penalty=1.4, logit_bias={7: 1.5}),
]
DRAWN = [
    [45, 9, 22, 32, 25, 20, 37, 43, 19, 2, 38, 7],
    [44, 5, 20, 9, 24, 10, 7, 43, 31, 41, 31, 42],
    [27, 29, 48, 6, 0, 8, 48, 12, 3, 31, 39, 37],
    [49, 34, 30, 9, 20, 38, 45, 27, 21, 8, 31, 33],
]


class NoEven(GrammarState):
    """Allows odd tokens alone."""

    def forbidden(self):
        return torch.arange(V) % 2 == 0


def test_rows_on_a_device_draw_what_they_draw_on_the_cpu(monkeypatch):
    kinds = [*KINDS, Sampling(seed=1)]

    def drawn(device):
        pickers = [Picker(replace(kind, seed=3), [1, 9], 2) for kind in kinds]
        pickers[-1] = Picker(kinds[-1], [1], grammar=NoEven(None, V))
        return pick(logits_of(len(kinds), seed=8).to(device, non_blocking=True), pickers)

    for candidates, waits in ((1024, 1), (4, 2)):
        monkeypatch.setattr(sampler, "_CANDIDATES", candidates)
        expected = drawn("cpu")
        assert expected[-1].token % 2 == 1
        with PretendDevice() as device:
            assert drawn("cuda") == expected
        assert sum(device.waits.values()) == waits, "once more where a nucleus is wider"


def draws(row, sampling, count):
    picker = Picker(sampling, [0])
    return [picked.token for picked in pick(row.expand(count, -1), [picker] * count)]


def test_tokens_are_drawn_as_often_as_they_are_likely():
    row = logits_of(1)[0]
    for sampling in (Sampling(seed=1), Sampling(top_p=0.9, seed=1)):
        expected = reference(row, sampling)
        counts = torch.bincount(torch.tensor(draws(row, sampling, 1500)), minlength=V) / 1500
        assert float((counts - expected).abs().sum()) < 0.17
        assert bool((expected[counts > 0] > 0).all())


def test_a_row_draws_the_same_whoever_is_beside_it():
    logits = logits_of(len(SAMPLINGS))

    def chosen(rows):
        pickers = [Picker(replace(SAMPLINGS[row], seed=row), [0]) for row in rows]
        found = [[picked.token for picked in pick(logits[rows], pickers)] for _ in range(30)]
        return dict(zip(rows, zip(*found, strict=True), strict=True))

    together = chosen(list(range(len(SAMPLINGS))))
    for row in range(len(SAMPLINGS)):
        assert chosen([row])[row] == together[row]
    assert chosen([8, 2])[2] == together[2]
    assert len(set(together[0])) > 1


def test_the_repetition_penalty_is_transformers():
    logits = logits_of(1)
    prompt, answer = [3, 4, 4, 7], [9, 3]
    picker = Picker(Sampling(temperature=0.0, repetition_penalty=1.7), prompt, top_logprobs=V)
    for token in answer:
        picker.take(token)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + answer]), logits)
    (picked,) = pick(logits, [picker])
    assert picked.token == int(expected.argmax())
    told = torch.zeros(V)
    for token, logprob in picked.logprobs.top:
        told[token] = logprob
    assert_close(told, expected[0].log_softmax(-1))
    assert torch.equal(logits, logits_of(1)), "the caller's logits stay as they are"


def test_presence_frequency_and_bias_as_openai_has_them():
    logits = logits_of(1)
    sampling = Sampling(
        temperature=0.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={5: 100.0, 6: -2.0},
    )
    picker = Picker(sampling, [1, 2], top_logprobs=2)
    for token in (8, 8, 9):
        picker.take(token)
    expected = logits[0].clone()
    expected[8] -= 0.5 + 2 * 0.25
    expected[9] -= 0.5 + 0.25
    expected[5] += 100
    expected[6] -= 2
    (found,) = pick(logits, [picker])
    assert found.token == 5 == found.logprobs.token
    assert math.isclose(found.logprobs.logprob, float(expected.log_softmax(-1)[5]), abs_tol=1e-5)
    assert [token for token, _ in found.logprobs.top] == expected.topk(2).indices.tolist()


def test_greedy_rows_beside_others_take_their_best():
    logits = logits_of(3)
    pickers = [
        Picker(Sampling(temperature=0.0), [0]),
        Picker(Sampling(seed=1), [0]),
        Picker(Sampling(temperature=0.0), [0]),
    ]
    found = pick(logits, pickers)
    assert [found[0].token, found[2].token] == logits[[0, 2]].argmax(-1).tolist()
    assert pick(logits[:1], pickers[:1])[0].token == found[0].token


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_told_of_alone(value, temperature):
    logits = logits_of(3)
    logits[1, 4] = value
    pickers = [Picker(Sampling(temperature=temperature, seed=2), [0]) for _ in range(3)]
    found = pick(logits, pickers)
    assert [picked.error is None for picked in found] == [True, False, True]
    assert "not finite" in found[1].error


def test_what_fails_for_one_row_is_that_rows_error():
    class Broken:
        def unsafe_compute_mask_ptr(self, *_):
            raise RuntimeError

    plain, grammar = Sampling(temperature=0.0), GrammarState(Broken(), V, "tools")
    logits, beside = logits_of(3), Picker(plain, [1])
    found = pick(logits, [beside, Picker(plain, [1], grammar=grammar), beside])
    assert found[1].error == "no token can be chosen with these sampling parameters"
    assert [found[0].token, found[2].token] == logits[[0, 2]].argmax(-1).tolist()


def test_numbers_too_small_for_float32_hurt_nobody():
    logits = logits_of(3)
    for sampling in (Sampling(temperature=5e-324), Sampling(temperature=1.0, top_p=5e-324)):
        pickers = [Picker(sampling, [1, 2]), Picker(Sampling(temperature=0.0), [1])]
        assert [got.token for got in pick(logits[:2], pickers)] == logits[:2].argmax(-1).tolist()
    beside = Picker(Sampling(temperature=0.0), [1])
    broken = Picker(Sampling(temperature=0.0, repetition_penalty=5e-324), [1, 2])
    found = pick(logits, [beside, broken, beside])
    assert found[1].error is not None
    assert [found[0].token, found[2].token] == logits[[0, 2]].argmax(-1).tolist()


def test_any_temperature_is_safe():
    for temperature in (1e-40, 1e-8, 1e8):
        picker = Picker(Sampling(temperature=temperature, seed=1, top_p=0.9), [0])
        (found,) = pick(1e4 * logits_of(1), [picker])
        assert 0 <= found.token < V
