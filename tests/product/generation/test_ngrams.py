"""N-gram drafts are what a slow search finds, and are made where they pay."""

import random

import pytest

from buddy.generation.ngrams import LONGEST_KEY, LONGEST_MATCH, NgramIndex
from buddy.generation.payoff import MOST_DRAFTED, AcceptRates, DraftCost, draft_length


def slow(tokens, most):
    """The latest place before the end that ends alike in most tokens, and what followed it."""
    best, place = 0, 0
    for stop in range(1, len(tokens)):
        size = 0
        while size < stop and tokens[stop - size - 1] == tokens[len(tokens) - size - 1]:
            size += 1
        if min(size, LONGEST_KEY) >= max(1, min(best, LONGEST_KEY)):
            best, place = size, stop
    if not best:
        return 0, []
    text = list(tokens)
    for _ in range(most):
        text.append(text[place + len(text) - len(tokens)])
    return min(best, LONGEST_MATCH), text[len(tokens) :]


@pytest.mark.parametrize("words", [2, 5, 40])
def test_what_followed_is_what_a_slow_search_finds(words):
    draw, tokens = random.Random(words), []
    index, found = NgramIndex(), set()
    for _ in range(120):
        copies = len(tokens) > 6 and draw.random() < 0.7
        token = tokens[-7] if copies else draw.randrange(words)
        tokens.append(token)
        index.add(token)
        match, drafted = slow(tokens, 5)
        assert index.match == match
        assert index.propose(5) == drafted
        found.add(match)
    assert len(index) == len(NgramIndex(tokens)) == 120
    assert 0 in found
    assert len(found) > 2


def test_a_text_that_repeats_itself_is_drafted_as_it_goes_on():
    index = NgramIndex([9, 1, 2, 3, 1, 2, 3, 1])
    assert index.propose(8) == [2, 3, 1, 2, 3, 1, 2, 3]
    assert index.match == 4
    assert NgramIndex([1, 2, 3]).propose(8) == []


def test_a_draft_is_as_long_as_it_pays():
    assert draft_length(0.9, 0.05, rows=1) == MOST_DRAFTED
    assert draft_length(0.9, 0.05, rows=1, most=3) == 3
    # 1.25 times the cost is 0.25: 0.6 and 0.36 are more, 0.216 is not.
    assert draft_length(0.6, 0.2, rows=1) == 2
    assert draft_length(0.6, 0.1, rows=2) == 2
    assert draft_length(0.2, 0.2, rows=1) == 0


def test_what_is_wrong_is_given_up_and_tried_again():
    rates = AcceptRates()
    first = rates.chance(4)
    for _ in range(20):
        rates.add(4, drafted=3, accepted=0)
    assert draft_length(rates.chance(4), 0.1, rows=1) == 0
    assert rates.chance(20) > first > 0.4, "other matches are another matter"
    tokens = 0
    while not draft_length(rates.chance(4), 0.1, rows=1):
        rates.forget(1)
        tokens += 1
    assert 10 < tokens < 400
    rates.add(4, drafted=3, accepted=3)
    assert rates.chance(4) > 0.3


def test_a_drafted_token_costs_what_it_adds_to_a_pass():
    cost = DraftCost()
    unknown = cost.of_token(1)
    cost.add(1, 4, 9.0)
    assert cost.of_token(1) == unknown, "nothing to compare with"
    for seconds in (2.0, 2.0, 50.0):  # one was disturbed
        cost.add(1, 0, seconds)
    cost.add(1, 4, 2.4)
    assert cost.of_token(1) == pytest.approx(0.05)
    assert cost.of_token(4) == unknown, "other passes are another matter"
    assert cost.of_token(4, first=0.0) == 0
    for _ in range(3):
        cost.add(1, 4, 1.0)
    assert cost.of_token(1) == 0, "never less than nothing"
