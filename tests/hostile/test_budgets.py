"""Whatever stands in the place of a budget is read as written, or refused in one line."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from buddy.budget.blocks import Budget
from buddy.budget.request import CalledBudget, read_blocks, read_budget
from buddy.budget.resolved import Limits
from buddy.budget.source import Progress
from buddy.errors import BudgetError
from buddy.generation.budgets import read_rows

NUM_BLOCKS = 30
LIMITS = Limits(num_blocks=NUM_BLOCKS, least=3, has_predictor=True)


def blocks_of(value, batch=1):
    """Blocks of each row; None where the predictor is to choose."""
    return tuple(request.resolve(LIMITS).blocks for request in read_rows(value, batch))


REFUSED = [
    "\u0660.\u0665",
    "\uff11\uff18 blocks",
    "\u00a00.5",
    "1_8 blocks",
    "1_0%",
    "1e-1",
    "1E0",
    "0x1",
    "+0.5",
    "+18 blocks",
    "-0",
    "-0.0",
    " 60 %",
    "60%%",
    "%",
    ".",
    "0,5",
    "1/2",
    "18 block s",
    "18\nblocks",
    "nan",
    "inf",
    "-inf",
    "infinity",
    "0",
    "0%",
    "0.0",
    "101%",
    "18",
    "1.5",
    "2 blocks",
    "31 blocks",
    "0.5 blocks",
    "aut\u00f6",
    "\uff41uto",
    "auto blocks",
    "0.5\x00",
    "\udc80",
    "",
    " ",
    "9" * 5000,
    "9" * 5000 + " blocks",
    "0." + "5" * 5000,
    "x" * 100_000,
    10**5000,
    -(10**5000),
    10**400,
    18,
    2,
    -1,
    0,
    -0.0,
    math.nan,
    math.inf,
    1e300,
    5e-324,
    True,
    [],
    np.bool_(True),
    np.int64(18),
    np.float32("nan"),
    np.float16("inf"),
    np.array([0.5, 0.5]),
    np.array("0.5"),
    np.complex64(0.5),
    torch.tensor(18),
    torch.tensor(True),
    torch.tensor(torch.nan),
    torch.empty((), device="meta"),
    torch.tensor([0.5]),
    torch.tensor([[2]]),
    torch.empty(0),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda one: f"{type(one)}")
def test_what_is_no_budget_is_refused_in_one_short_line(value):
    with pytest.raises(BudgetError) as caught:
        blocks_of(value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    str(caught.value).encode()


@pytest.mark.parametrize("value", REFUSED[:30])
@pytest.mark.parametrize("phases", ["prefill:{},decode:0.5", "prefill:0.5,decode:{}"])
def test_each_phase_is_read_by_the_same_parser(value, phases):
    text = phases.format(value)
    with pytest.raises(BudgetError) as caught:
        read_budget(text).resolve(LIMITS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "blocks"),
    [
        ("0.6", 18),
        (" 0.6\n", 18),
        (".6", 18),
        ("1.", 30),
        ("60%", 18),
        ("60.0%", 18),
        ("0018 blocks", 18),
        ("18blocks", 18),
        ("3  BLOCKS", 3),
        ("0.55", 16),
        ("55%", 16),
        ("0.550000000000000000000000000001", 17),  # exactly as written: above a half
        (np.float64(0.6), 18),
        (np.float32(0.6), 18),
        (np.float32(0.55), 16),  # 0.550000012 in float32
        (np.float16(0.55), 16),
        (np.float32(1), 30),
        (np.int64(1), 30),
        (np.array(0.6), 18),
        (np.str_("18 blocks"), 18),
        (torch.tensor(0.6), 18),
        (torch.tensor(0.55), 16),
        (torch.tensor(0.6, dtype=torch.bfloat16), 18),
        (torch.tensor(1), 30),
        (torch.tensor([18]), 18),
        ([np.float32(0.6)], 18),
        ([torch.tensor(0.6)], 18),
    ],
)
def test_a_number_is_read_whatever_holds_it(value, blocks):
    assert blocks_of(value) == (blocks,)


def test_auto_is_no_number_of_the_prompt_nor_of_a_callable():
    assert blocks_of(" AUTO ", 2) == (None, None)
    for refuse in (
        lambda: read_blocks("auto", "prefill_budget"),
        lambda: CalledBudget(lambda _: "auto").ask(
            Progress(is_prompt=True, new_tokens=1, num_blocks=NUM_BLOCKS)
        ),
    ):
        with pytest.raises(BudgetError, match="auto"):
            refuse()


number_like = st.from_regex(r"\A[-+ ]?[0-9\u0660-\u0669_.,eE]{0,12} ?(%|blocks?|)\s?\Z")
anything = st.one_of(
    st.text(),
    number_like,
    st.floats(),
    st.integers(),
    st.fractions(),
    st.floats(width=16).map(np.float16),
    st.floats(width=32).map(np.float32),
    st.floats(width=32).map(torch.tensor),
    st.booleans(),
)


def refusal(call, *arguments):
    """What a call returns, or the message that it refuses with."""
    try:
        return call(*arguments), ""
    except BudgetError as error:
        return None, str(error)


@given(anything, st.integers(1, 128))
def test_only_a_budget_error_comes_out_and_what_is_read_can_be_written_again(value, num_blocks):
    limits = Limits(num_blocks=num_blocks, least=1, has_predictor=True)
    resolved, refused = refusal(lambda: read_budget(value).resolve(limits))
    assert "\n" not in refused
    if refused:
        return
    blocks = resolved.blocks
    if blocks is None:
        assert value.strip().lower() == resolved.written(num_blocks) == "auto"
        return
    budget = Budget(blocks, num_blocks)
    for again in (f"{blocks} blocks", budget, budget.ratio):
        assert read_budget(again).resolve(limits) == resolved


@given(
    st.text()
    | number_like.map("prefill:{},decode:0.5".format)
    | st.from_regex(r"\A[a-z:,0-9. ]*\Z")
)
def test_text_is_a_budget_of_some_form_or_refused(text):
    limits = Limits(num_blocks=NUM_BLOCKS, least=3, has_predictor=True, means=(3, NUM_BLOCKS))
    request, refused = refusal(read_budget, text)
    assert "\n" not in refused
    if not refused:
        assert request.text == text
        resolved, refused = refusal(request.resolve, limits)
        assert refused or 3 <= resolved.prompt <= NUM_BLOCKS


@given(st.integers(1, 10**6), st.integers(6, 9))
def test_a_decimal_is_read_exactly(digits, places):
    text = f"{digits:0{places + 1}d}"
    exact = Fraction(digits, 10**places)
    assert read_blocks(f"{text[:-places]}.{text[-places:]}").amount == exact
    assert (
        read_blocks(f"{text[:-places] + text[-places:][:2]}.{text[-places:][2:]}%").amount == exact
    )
