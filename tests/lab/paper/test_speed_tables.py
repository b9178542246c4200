"""Tables of time: made end to end on a tiny model."""

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.data.examples import Example
from buddy.errors import ResultError
from buddy.lab.paper.methods import ComparedMethod
from buddy.lab.paper.tables.speed import cut
from tests.lab.paper.made import make
from tests.product.policies.made import gated, random_pudding
from tests.tiny import tiny_model
from tests.words import word_tokenizer


def test_prompts_are_cut_to_the_median_length():
    examples = [Example(tuple(range(n)), (1,), "x") for n in (9, 3, 5, 4, 8)]
    prompts = cut(examples, 4)
    assert torch.equal(prompts[:, 0], torch.arange(5).expand(4, 5))


@pytest.fixture
def short(monkeypatch):
    """What is told apart below needs no long generations."""
    monkeypatch.setattr("buddy.lab.paper.tables.speed.NEW_TOKENS", 3)
    monkeypatch.setattr("buddy.lab.paper.tables.speed.ROUNDS", 1)


def test_speed_has_both_phases_of_both_sets_and_the_papers(model, data, tmp_path, short):
    pudding = BuddyForCausalLM(tiny_model(), learned=random_pudding(), policy="pudding")
    pudding.save_pretrained(tmp_path / "pudding", include_backbone=True, tokenizer=word_tokenizer())
    own = (ComparedMethod(label="PuDDing", model=str(tmp_path / "pudding")),)
    collected, record, said = make("speed", model, data, tmp_path / "out", methods=own)
    assert said == ["speed-alpaca", "speed-samsum", "speed-alpaca-1", "speed-samsum-1"]
    cells = record["results"]["cells"]
    for prompts in ("alpaca", "samsum"):
        found = {
            (cell["method"], cell["blocks"], cell["phase"])
            for cell in cells
            if cell["prompts"] == prompts
        }
        methods = ("Buddy", "Random, new each step", "PuDDing")
        assert found == {
            (name, blocks, phase)
            for phase in ("prefill", "decode")
            for name, depths in (
                *((name, (5, 4, 3)) for name in methods),
                ("Dense", (6,)),
                ("transformers", (6,)),
            )
            for blocks in depths
        }
    assert len(record["results"]["panels"]) == 4
    papers = {line["label"] for line in record["results"]["panels"][0]["lines"] if line["paper"]}
    assert papers == {"PuDDing", "FiRST", "Buddy"}
    sheet = collected.sheets[0]
    half = next(row for row in sheet.rows if row[:2] == ("Buddy", "3"))
    assert (half[4], half[7]) == ("1.91", "1.64")
    half = next(row for row in sheet.rows if row[:2] == ("PuDDing", "3"))
    assert (half[4], half[7]) == ("1.25", "2.07")
    _, again, said = make("speed", model, data, tmp_path / "out", methods=own)
    assert said == []
    assert again["results"] == record["results"]


def test_a_method_without_a_budget_stands_at_its_mean_depth(model, data, tmp_path, short):
    gated("d-llm").save_pretrained(
        tmp_path / "d-llm", include_backbone=True, tokenizer=word_tokenizer()
    )
    own = (ComparedMethod(label="D-LLM", model=str(tmp_path / "d-llm")),)
    collected, record, _ = make("speed", model, data, tmp_path / "out", methods=own)
    cells = [cell for cell in record["results"]["cells"] if cell["method"] == "D-LLM"]
    assert len(cells) == 4
    assert all(2 <= cell["mean_blocks"] < 6 for cell in cells)
    (row,) = [row for row in collected.sheets[0].rows if row[0] == "D-LLM"]
    depths = {cell["phase"]: cell["mean_blocks"] for cell in cells if cell["prompts"] == "alpaca"}
    assert row[1] == f"{depths['prefill']:.1f} / {depths['decode']:.1f}"
    panel = record["results"]["panels"][0]
    (line,) = [line for line in panel["lines"] if line["label"] == "D-LLM"]
    assert line["x"] == [pytest.approx(100 * (6 - depths["prefill"]) / 6)]


def test_the_breakdown_is_in_ms_and_sums_up(model, data, tmp_path, commands_here):
    collected, record, said = make("breakdown", model, None, tmp_path / "out")
    assert said[0].startswith(f"buddy bench --model {model}")
    assert record["config"]["steps"][0]["command"] == said[0]
    (sheet,) = collected.sheets
    *ours, paper = sheet.rows
    assert len(ours) == 6  # full, routed and random, in both phases
    for row in ours:
        parts = [float(cell.replace(",", "")) for cell in row[1:]]
        assert sum(parts[:-1]) == pytest.approx(parts[-1], abs=0.15)
    assert paper[1:4] == ("64.11", "4.58", "2.64")
    _, _, said = make("breakdown", model, None, tmp_path / "out")
    assert said == []


def test_a_command_of_other_settings_is_not_used(model, data, tmp_path, commands_here):
    out = tmp_path / "out"
    make("breakdown", model, None, out)
    with pytest.raises(ResultError, match=r"another command, `buddy bench.*--rounds 3.*delete it"):
        make("breakdown", model, None, out, full=True)


def test_a_command_that_fails_is_told_in_one_line(model, data, tmp_path):
    own = (ComparedMethod(label="none", policy="static:99"),)
    with pytest.raises(ValueError, match="99"):
        make("speed", model, data, tmp_path / "out", methods=own)


def test_a_step_is_a_process_of_its_own(model, tmp_path):
    _, record, _ = make("breakdown", model, None, tmp_path / "out")
    assert record["model"] == BuddyForCausalLM.from_pretrained(model).facts()
    assert (tmp_path / "out" / "breakdown.png").exists()
