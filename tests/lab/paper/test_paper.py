"""The paper's figures as they are in the package."""

import pytest

from buddy.lab.paper.levels import BUDGETS, blocks_of, level
from buddy.lab.paper.published.read import NUM_BLOCKS, TASK_NAMES, like, read_paper

TABLES = ("accuracy", "gsm8k", "speed", "ablations", "training-cost", "breakdown")
NAMES = ("model", "method", "prompts", "ablation", "setting", "piece")


@pytest.mark.parametrize("table", TABLES)
def test_every_cell_but_names_is_a_number(table):
    rows = read_paper(table)
    assert rows
    for row in rows:
        assert None not in row
        for name, cell in row.items():
            assert name in NAMES or float(cell) >= 0, (row, name)


def find(table, column, **wanted):
    (row,) = [r for r in read_paper(table) if all(r[k] == v for k, v in wanted.items())]
    return float(row[column])


def test_what_the_paper_says_in_its_text_follows_from_the_rows():
    # Kept at an eighth, a quarter, three eighths and a half removed: 99.9, 90.8, 80.7 and 71.3 %.
    dense = find("accuracy", "average", model="Llama-3-8B", method="Dense")
    kept = [
        100 * find("accuracy", "average", model="Llama-3-8B", method="Buddy", removed=n) / dense
        for n in ("4", "8", "12", "16")
    ]
    assert kept == pytest.approx([99.9, 90.8, 80.7, 71.3], abs=0.05)
    # Decode 1.64 and prefill 1.91 times as fast with half the blocks.
    for phase, speedup in (("decode", 1.64), ("prefill", 1.91)):
        whole = find("speed", phase, prompts="alpaca", method="Dense")
        half = find("speed", phase, prompts="alpaca", method="Buddy", removed="16")
        assert half / whole == pytest.approx(speedup, abs=0.005)


def test_some_cells():
    assert find("gsm8k", "gsm8k", model="Llama-2-7B", method="Buddy", removed="8") == 2.65
    assert find("ablations", "average", ablation="omega", setting="0.1", removed="16") == 46.9
    assert find("ablations", "average", ablation="start-layer", setting="3", removed="16") == 47.8
    assert find("training-cost", "fine_tuning_h", model="Llama-1-13B") == 24.93
    assert find("breakdown", "share", piece="router") == 5.67
    assert len(read_paper("accuracy")) == 96


def test_averages_are_those_of_the_eight_tasks():
    off = []
    for row in read_paper("accuracy"):
        mean = sum(float(row[task]) for task in TASK_NAMES) / 8
        if abs(mean - float(row["average"])) > 0.011:
            off.append((row["model"], row["method"], row["removed"]))
    assert off == []


def test_depths_are_the_same_shares_in_every_model():
    rows = read_paper("accuracy")
    for model, num_blocks in NUM_BLOCKS.items():
        own = [row for row in rows if row["model"] == model]
        at = {level(row, own): int(row["removed"]) for row in own if row["method"] == "Buddy"}
        assert list(at) == list(BUDGETS)
        if num_blocks != 28:  # its rows remove as many blocks as those of 32
            assert [num_blocks - blocks_of(b, num_blocks) for b in BUDGETS] == list(at.values())


def test_a_model_stands_beside_the_one_of_its_name():
    assert like("llama-3.1-8b", "accuracy") == "Llama-3-8B"
    assert like("Qwen/Qwen2.5-7B-Instruct", "gsm8k") == "Qwen2.5-7B-Instruct"
    assert like("smollm2-135m", "accuracy") == "Llama-3-8B"
