"""Few blocks draft where that pays, by what passes take and how often drafts are right."""

import random

import pytest

from buddy.generation.depth_drafts import FIRST_CHANCE, FIRST_WEIGHT, ShallowCost, places_that_pay
from buddy.generation.drafts import read_drafts
from buddy.generation.payoff import AcceptRate, DraftCost
from buddy.generation.text_drafter import TextDrafter


def slow(chances, pass_cost, token_cost, rows):
    """The set of rows that gains most over 1.25 times its cost, of all sets."""
    best, found = 0.0, []
    for number in range(1, 2 ** len(chances)):
        places = [place for place in range(len(chances)) if number >> place & 1]
        cost = 1.25 * rows * (pass_cost + token_cost * len(places))
        gain = sum(chances[place] for place in places) - cost
        if gain > best:
            best, found = gain, places
    return found


def test_the_rows_that_are_drafted_for_gain_most_of_all_sets():
    draw, sizes = random.Random(3), set()
    for _ in range(200):
        rows = draw.randint(1, 6)
        chances = [draw.random() for _ in range(draw.randint(0, rows))]
        costs = draw.uniform(0, 0.5), draw.uniform(0, 0.1)
        chosen = places_that_pay(chances, *costs, rows)
        assert chosen == slow(chances, *costs, rows)
        sizes.add((len(chosen), len(chances)))
    assert (0, 3) in sizes
    assert (2, 3) in sizes
    assert (3, 3) in sizes


def test_drafts_that_do_not_pay_are_given_up_and_tried_again():
    """A pass of few blocks takes 0.4 of a plain one, and a drafted token adds 0.1."""

    def pays(rate):
        return bool(places_that_pay([rate.chance], 0.4, 0.1, 1))

    rate = AcceptRate(FIRST_CHANCE, FIRST_WEIGHT)
    assert pays(rate)
    drafted = 0
    while pays(rate):
        rate.add(1, 0)
        drafted += 1
        assert drafted < 10
    assert drafted > 2, "one that is wrong says little"
    waited = 0
    while not pays(rate):
        rate.forget(1)
        waited += 1
        assert waited < 400
    assert waited > 10


def test_what_passes_of_few_blocks_take_is_learned_and_tried_again():
    cost = ShallowCost()
    assert cost.seconds(1, 0.4) == 0.4
    for seconds in (0.9, 9.0, 0.8):
        cost.add(1, seconds)
    assert cost.seconds(1, 0.4) == 0.9
    assert cost.seconds(2, 0.4) == 0.4, "other passes are another matter"
    asked = 0
    while cost.seconds(1, 0.4) != 0.4:
        asked += 1
        assert asked < 1000
    assert asked > 50
    cost.add(1, 0.7)
    assert cost.seconds(1, 0.4) == 0.7


def test_a_plain_pass_is_measured_now_and_then():
    cost = DraftCost()
    assert cost.plain_s(1) is None
    cost.add(1, 2, 5.0)
    assert cost.plain_s(1) is None
    cost.add(1, 0, 2.0)
    passes = 0
    while cost.plain_s(1) == 2.0:
        cost.add(1, 2, 3.0)
        passes += 1
        assert passes < 100
    assert passes > 10
    cost.add(1, 0, 4.0)
    assert cost.plain_s(1) == 3.0
    assert cost.plain_s(2) is None


def test_a_text_learns_of_each_kind_of_draft_by_itself():
    text = TextDrafter([1, 2, 3, 1, 2], ngrams=True, blocks=3)
    first = text.chance
    assert text.draft(0.0, 1, 2) == [3, 1]
    text.judged(0)
    assert text.chance == first
    text.drafted(2)
    text.judged(1)
    assert text.chance == pytest.approx((first * 12 + 1) / 14)
    assert TextDrafter([1, 1, 1], ngrams=False, blocks=3).draft(0.0, 1, 2) == []
    assert read_drafts("ngram+3 blocks").ngrams
