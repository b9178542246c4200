"""A mean over the tokens of an answer, asked of a model that has a ledger."""

import pytest
import torch

from buddy import BuddyForCausalLM, DepthTrace
from buddy.errors import BudgetError, CheckpointError
from buddy.routing.ledger import Ledger, LedgerConfig
from tests.tiny import NUM_BLOCKS, VOCAB, random_ids, tiny_buddy
from tests.words import word_tokenizer

LEVELS = (3, 4, 6)


def random_ledger(seed=0):
    made = Ledger(LedgerConfig(levels=LEVELS, means=(3, 6), tokens=VOCAB - 10))
    draw = torch.Generator().manual_seed(seed)
    made.losses.copy_(torch.tensor([1.0, 0.8, 0.5]))
    made.token_ids.copy_(torch.arange(10, VOCAB))
    made.offsets.copy_(torch.randn(made.offsets.shape, generator=draw))
    made.prices.fill_(0.1)
    return made


def with_ledger(family="llama", **options):
    made = tiny_buddy(family, **options)
    made.ledger = random_ledger()
    return made


@pytest.mark.parametrize("engine", ["general", "native"])
@pytest.mark.parametrize("prefill", [None, 1.0])
def test_each_token_runs_what_the_ledger_says_of_it(engine, prefill):
    buddy = with_ledger(engine=engine)
    ids, trace = random_ids(1, 6), DepthTrace()
    out = buddy.generate(
        ids, budget="mean:0.75", prefill_budget=prefill, max_new_tokens=12, do_sample=False,
        trace=trace,
    )  # fmt: skip
    fed = out[0, 6:-1].tolist()
    ran = [step.executed[0] for step in trace.steps]
    assert ran[0] == (4 if prefill is None else NUM_BLOCKS)
    assert ran[1:] == buddy.read_sources("mean:0.75", None, 1)[0].levels(fed)
    assert len(set(ran[1:])) > 1
    assert {step.engine for step in trace.steps[1:]} == {engine}


def test_rows_have_accounts_of_their_own():
    buddy, trace = with_ledger(), DepthTrace()
    ids = random_ids(3, 6)
    budgets = ["mean:0.75", "4 blocks", "mean:5 blocks"]
    out = buddy.generate(ids, budget=budgets, max_new_tokens=10, do_sample=False, trace=trace)
    for row, budget in enumerate(budgets):
        alone = buddy.generate(
            ids[row : row + 1], budget=budget, max_new_tokens=10, do_sample=False
        )
        assert torch.equal(out[row], alone[0])
    spent = [sum(step.executed[row] for step in trace.steps[1:]) for row in range(3)]
    assert spent[0] <= 4.5 * 9
    assert spent[1] == 4 * 9
    assert spent[2] <= 5 * 9


@torch.no_grad()
def test_a_beginning_that_is_shared_is_of_the_prompt():
    buddy = with_ledger()
    session = buddy(random_ids(1, 6), budget="4 blocks").cache
    (first,) = session.sequences
    made = session.branch(first, 5, buddy.read_sources("mean:0.75", None, 1)[0])
    assert session.sequences[made].prompt_length == session.sequences[made].length == 5


def test_a_mean_that_cannot_be_spent_is_refused():
    plain, buddy = tiny_buddy(), with_ledger()
    for model, budget, what in (
        (plain, "mean:0.7", "needs a ledger"),
        (buddy, "mean:0.2", "outside what this model's ledger spends"),
        (buddy, "mean:auto", "budget 'mean:auto' cannot be read: .* such as mean:0.7"),
        (buddy, "mean:often", "cannot be read"),
        (buddy, ["mean:0.7", "mean:2"], "budget 'mean:2' cannot be read: .*mean:18 blocks"),
    ):
        batch = 2 if isinstance(budget, list) else 1
        with pytest.raises(BudgetError, match=what):
            model.generate(random_ids(batch, 4), budget=budget, max_new_tokens=2)


def test_a_checkpoint_keeps_it(tmp_path):
    buddy = with_ledger("qwen3")
    buddy.save_pretrained(tmp_path / "model", tokenizer=word_tokenizer())
    loaded = BuddyForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert loaded.ledger.config == buddy.ledger.config
    for name, tensor in buddy.ledger.state_dict().items():
        assert torch.equal(loaded.ledger.state_dict()[name], tensor)
    assert loaded.facts()["ledger"] == buddy.facts()["ledger"]
    buddy.ledger = Ledger(LedgerConfig(levels=(3, 7), means=(3, 7), tokens=1))
    buddy.save_pretrained(tmp_path / "foreign", tokenizer=word_tokenizer())
    with pytest.raises(CheckpointError, match="its highest level is 7 blocks"):
        BuddyForCausalLM.from_pretrained(tmp_path / "foreign")
