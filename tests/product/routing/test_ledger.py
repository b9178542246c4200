"""The ledger: what it spends, worked by hand, and that it never spends what it does not have."""

import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from threading import Barrier

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from buddy.budget.ledger import HASTE
from buddy.budget.source import Progress, blocks_of_lanes
from buddy.errors import BudgetError, PolicyError
from buddy.routing.ledger import Ledger, LedgerConfig


def ledger(levels, losses, rows, prices, means=None):
    made = Ledger(LedgerConfig(levels=levels, means=means or levels, tokens=len(rows)))
    made.losses.copy_(torch.tensor(losses))
    if rows:
        made.token_ids.copy_(torch.tensor(list(rows), dtype=torch.float32))
        made.offsets.copy_(torch.tensor(list(rows.values())))
    made.prices.copy_(torch.tensor(prices))
    return made


def test_worked_by_hand():
    # Two levels; token 7 gains 1 nat by four blocks more, others 0.1; a block costs 0.1 nats.
    made = ledger((4, 8), [1.1, 1.0], {7: [0.9, 0.0]}, [0.1, 0.1])
    spend = made.budget(Fraction(6)).levels
    # Token 7 wants 8, and 6 are there: it runs 4. Then 8 are there; token 3 is not worth it.
    # Then 10 are there, and token 7 has its 8; then 8, and again.
    assert spend([7, 3, 7, 7, 7]) == [4, 4, 8, 8, 4]
    assert spend([]) == []


def test_a_full_account_makes_blocks_cheaper():
    gain, block = 0.3, 0.1
    made = ledger((4, 8), [1.0 + gain, 1.0], {}, [block, block])
    spent = made.budget(Fraction(6)).levels([1] * 12)
    held = 0
    for level in spent:
        price = block * math.exp(-HASTE * held / 6)
        assert level == (8 if held + 6 >= 8 and gain > 4 * price else 4)
        held += 6 - level
    assert 8 in spent
    assert 4 in spent[1:]


levels_drawn = st.lists(st.integers(3, 40), min_size=2, max_size=6, unique=True).map(sorted)


@given(
    levels=levels_drawn,
    seed=st.integers(0, 2**31),
    share=st.fractions(0, 1, max_denominator=97),
    ids=st.lists(st.integers(0, 12), max_size=60),
)
def test_after_every_token_the_answer_has_run_at_most_the_mean_times_its_tokens(
    levels, seed, share, ids
):
    draw = torch.Generator().manual_seed(seed)
    made = ledger(tuple(levels), [0.0] * len(levels), dict.fromkeys(range(8), [0.0] * len(levels)),
                  [0.0] * len(levels))  # fmt: skip
    for part in (made.losses, made.offsets, made.prices):
        part.copy_(torch.randn(part.shape, generator=draw))
    mean = levels[0] + share * (levels[-1] - levels[0])
    source = made.budget(mean)
    spent = source.levels(ids)
    total = 0
    for count, level in enumerate(spent, 1):
        total += level
        assert level in levels
        assert total <= mean * count
    # Fed singly, or in parts, it is the same.
    cut = len(ids) // 2
    first = source.levels(ids[:cut])
    rest = source.ask(
        Progress(
            is_prompt=False,
            new_tokens=len(ids) - cut,
            num_blocks=40,
            answer_tokens=cut,
            answer_executed=sum(first),
            token_ids=tuple(ids[cut:]),
        )
    )
    assert first + list(rest) == spent


def test_the_prompt_runs_the_mean_rounded_down():
    made = ledger((4, 8), [1.0, 0.5], {}, [0.1, 0.1])
    asked = Progress(is_prompt=True, new_tokens=9, num_blocks=8, token_ids=(1,) * 9)
    assert blocks_of_lanes(made.budget(Fraction(27, 4)), asked) == (6,)


def test_a_mean_that_no_level_meets_is_refused():
    made = ledger((4, 8), [1.0, 0.5], {}, [0.1, 0.1])
    for mean in (Fraction(39, 10), Fraction(81, 10)):
        with pytest.raises(BudgetError, match="expected 4 to 8 blocks"):
            made.budget(mean)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"levels": (4,), "means": (4, 8)}, "ledger.levels must be at least two"),
        ({"levels": (8, 4), "means": (4, 8)}, "ledger.levels must be at least two"),
        ({"levels": (4, 8), "means": (3, 8)}, "ledger.means must lie between"),
        ({"levels": (4, 8), "means": (4, 8), "tokens": -1}, "tokens must be"),
    ],
)
def test_shapes_that_cannot_be_are_refused(settings, what):
    with pytest.raises(PolicyError, match=what):
        LedgerConfig(**{"tokens": 3, **settings})


def test_it_stays_in_float32():
    made = ledger((4, 8), [1.1, 1.0], {49_151: [0.9, 0.0]}, [0.1, 0.1]).to(torch.bfloat16)
    assert made.offsets.dtype == torch.float32
    assert made.expected(49_151)[0] == pytest.approx(2.0)
    assert made.expected(5)[0] == pytest.approx(1.1)


def test_a_debt_of_another_budget_is_made_up_for_by_the_least_level():
    spend = ledger((4, 8), [1.5, 1.0], {}, [0.1, 0.1]).budget(Fraction(6))
    ran = [spend.level(1, tokens, executed) for tokens, executed in [(3, 40), (10**4, 10**6)]]
    assert ran == [4, 4]
    assert spend.level(1, 1, 8) == 4
    assert spend.level(1, 2, 8) == 8


def test_it_follows_its_tensors():
    made = ledger((4, 8), [1.0, 1.0], {7: [0.0, 0.0]}, [0.1, 0.1])
    spend = made.budget(Fraction(8)).levels
    assert spend([7, 3]) == [4, 4]
    made.load_state_dict(ledger((4, 8), [2.0, 1.0], {3: [-1.0, 0.0]}, [0.1, 0.1]).state_dict())
    assert spend([7, 3]) == [8, 4]
    made.prices.fill_(1.0)
    assert spend([7, 3]) == [4, 4]


def test_threads_that_ask_at_once_are_told_the_same():
    rows = {token: [float(token), 0.0] for token in range(2000)}
    for _ in range(20):
        made = ledger((4, 8), [-1.0, 0.0], rows, [0.1, 0.1])
        start = Barrier(6, timeout=60)

        def ask(made=made, start=start):
            start.wait()
            return made.expected(1999)[0]

        with ThreadPoolExecutor(6) as pool:
            told = [pool.submit(ask) for _ in range(6)]
        assert {future.result() for future in told} == {1998.0}
