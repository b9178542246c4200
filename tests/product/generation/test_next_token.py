"""The next token: as transformers and torch choose it."""

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from buddy.errors import ModelError
from buddy.generation import next_token
from buddy.generation.next_token import FiniteLogits, best_and_chances, best_token, process


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_best_is_the_first_of_equals(dtype):
    scores = torch.zeros(3, 1000, dtype=dtype)
    scores[0, [700, 20, 900]] = 1.0
    scores[1, 999] = 1.0
    scores[2] = -torch.inf
    assert best_token(scores).tolist() == [20, 999, 0]


def test_the_best_is_that_of_torch():
    scores = torch.randn(8, 5000)
    assert torch.equal(best_token(scores), scores.argmax(-1))


@pytest.mark.parametrize("is_quick", [True, False])
def test_the_chance_is_the_probability_of_the_best(is_quick, monkeypatch):
    monkeypatch.setattr(next_token, "_is_quick", lambda scores: is_quick)
    logits = 3 * torch.randn(3, 500)
    best, chances = best_and_chances(logits)
    assert best.tolist() == logits.argmax(-1).tolist()
    assert chances == pytest.approx(logits.softmax(-1).max(-1).values.tolist(), rel=1e-5)


def test_processors_are_called_as_transformers_calls_them():
    listed = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(0.5), FiniteLogits()]
    )
    ids, logits = torch.randint(50, (2, 7)), torch.randn(2, 50)
    assert torch.equal(process(listed, ids, logits.clone()), listed(ids, logits.clone()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_any_row_that_is_not_finite_is_refused(wrong, dtype):
    logits = torch.randn(3, 50).to(dtype)
    logits[0, 7] = -torch.inf
    assert process([FiniteLogits()], torch.zeros(1, 7, dtype=torch.long), logits) is logits
    logits[1, 4] = wrong
    with pytest.raises(ModelError, match="the logits after 7 tokens are not finite"):
        process([FiniteLogits()], torch.zeros(1, 7, dtype=torch.long), logits)
