"""A budget is read once, and a form of its own is all that a new budget takes."""

from dataclasses import dataclass

import pytest

from buddy.budget import request as requests
from buddy.budget.request import BudgetRequest, read_blocks, read_budget
from buddy.budget.resolved import ResolvedBudget
from buddy.cli.main import main
from buddy.errors import BudgetError
from buddy.lab.evaluation.conditions import plan_conditions
from buddy.serving.http.budget_rules import BudgetRules
from tests.tiny import NUM_BLOCKS, random_ids, tiny_buddy
from tests.words import word_tokenizer


class Alternating:
    """Full depth for tokens at even places of the answer, fewer blocks for the others."""

    def __init__(self, low):
        self.low = low

    def ask(self, progress):
        is_even = progress.answer_tokens % 2 == 0
        return progress.num_blocks if progress.is_prompt or is_even else self.low


@dataclass(frozen=True, kw_only=True, slots=True)
class Every(BudgetRequest):
    """A toy form: `every:0.5` runs each second token of the answer at half depth."""

    low: BudgetRequest

    @classmethod
    def read(cls, value):
        if not isinstance(value, str) or not value.startswith("every:"):
            return None
        return cls(low=read_blocks(value.removeprefix("every:")))

    def in_blocks(self, limits):
        low = self.low.blocks(limits.num_blocks)
        return ResolvedBudget(kind="every", least=low, most=limits.num_blocks, own=Alternating(low))


@pytest.fixture
def every(monkeypatch):
    monkeypatch.setattr(requests, "FORMS", (Every, *requests.FORMS))


@pytest.mark.usefixtures("every")
def test_a_new_form_is_known_to_python_the_server_and_evaluation():
    buddy = tiny_buddy()
    (source,) = buddy.read_sources("every:0.5", None, 1)
    assert source.low == 3
    out = buddy.generate(random_ids(1, 4), budget="every:0.5", max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 8)
    budget = BudgetRules(num_blocks=30, has_predictor=False).read("every:0.5", None, None)
    assert (budget.kind, budget.is_contract, budget.depths()) == ("every", True, (30, 15))
    assert budget.token_source(None).low == 15
    (condition,) = plan_conditions(buddy, ("static:1,2,3,4",), ("every:0.5",))
    assert condition.source.low == 3
    assert condition.is_free
    with pytest.raises(BudgetError, match="budget 7 is not allowed"):
        read_budget("every:7")


def test_a_command_reads_the_text_of_a_budget_once(tmp_path, monkeypatch, capsys):
    read = []

    class Watching(Every):
        """Notes what text is read, and reads nothing."""

        @classmethod
        def read(cls, value):
            if isinstance(value, str):  # later the source that it became is handed on
                read.append(value)

    folder = str(tmp_path / "model")
    tiny_buddy().save_pretrained(folder, tokenizer=word_tokenizer())
    monkeypatch.setattr(requests, "FORMS", (Watching, *requests.FORMS))

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["buddy", *command, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    command = ["generate", "w3 w5", "-m", folder, "--raw", "--max-new-tokens", "3", "--json"]
    assert '"executed": 3' in run("-b", "0.5")
    assert read == ["0.5"]
    read.clear()
    assert f'"executed": {NUM_BLOCKS}' in run("-b", "0.5", "--prefill-budget", "1.0")
    assert sorted(read) == ["0.5", "1.0"]
