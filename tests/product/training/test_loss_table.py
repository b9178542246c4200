"""The table gives what the model would have given, is measured once, and goes on where it was."""

import pytest
import torch
from torch.testing import assert_close

from buddy.errors import RecipeError, TrainingError
from buddy.training.predictor.loss_table import LossTable, measure_table
from buddy.training.predictor.reward_model import RewardModel
from tests.product.training.made import examples
from tests.tiny import tiny_buddy, tiny_model


@pytest.fixture
def live():
    return RewardModel(tiny_buddy("qwen3"))


def measure(live, path, rows=7, **options):
    options = {"lowest": 3, "batch_size": 2, **options}
    return measure_table(live, examples(rows), path / "table.safetensors", **options)


def test_the_same_losses_and_summaries_as_the_model_gives(live, tmp_path):
    table = measure(live, tmp_path)
    some = [examples(7)[place] for place in (5, 0, 3, 5)]
    blocks = torch.tensor([[3, 6], [4, 4], [5, 3], [6, 5]])
    # atol: batches of other sizes sum in another order.
    assert_close(table.losses(some, blocks), live.losses(some, blocks), atol=1e-4, rtol=1e-4)
    assert_close(table.summaries(some), live.summaries(some), atol=1e-5, rtol=1e-5)
    assert table.by_depth.isfinite().all()
    assert table.by_depth.std(0).min() > 0.01
    assert table.by_depth.std(1).min() > 0.01


def test_depths_that_pinned_blocks_exceed_are_not_measured(tmp_path):
    live = RewardModel(tiny_buddy(context_layer=3))
    table = measure(live, tmp_path, lowest=4)
    assert table.by_depth.isnan().sum(0).tolist() == [7, 0, 0, 0]


def test_repeated_rows_are_measured_once(live, tmp_path):
    rows = examples(3) * 4
    table = measure_table(live, rows, tmp_path / "t.safetensors", lowest=3, batch_size=2)
    assert len(table.examples) == 3
    assert table.losses(rows, torch.full((12, 1), 4)).shape == (12, 1)


class StopAt(RewardModel):
    """Killed before it measures so many rows."""

    def __init__(self, model, rows):
        super().__init__(model)
        self.left = rows

    def losses(self, some, blocks):
        if self.left < len(some):
            raise KeyboardInterrupt
        self.left -= len(some)
        return super().losses(some, blocks)


def test_stopped_it_goes_on_to_the_same_table(live, tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    whole = measure(live, tmp_path / "whole")
    monkeypatch.setattr("buddy.resume.SAVE_EVERY_S", -1.0)
    with pytest.raises(KeyboardInterrupt):
        measure(StopAt(live.model, 4), tmp_path)
    seen = []
    again = measure(
        StopAt(live.model, 3), tmp_path, on_rows=lambda done, rows: seen.append((done, rows))
    )
    assert seen == [(4, 7), (6, 7), (7, 7)]
    assert torch.equal(again.by_depth, whole.by_depth)
    assert torch.equal(again.summaries(again.examples), whole.summaries(whole.examples))
    # Complete, it needs no model at all.
    measure(StopAt(live.model, 0), tmp_path)


def test_another_models_or_other_rows_table_is_refused(live, tmp_path):
    measure(live, tmp_path)
    with pytest.raises(TrainingError, match=r"another run, with other rows \("):
        measure(live, tmp_path, rows=6)
    with torch.no_grad():
        live.model.router.decision.up.bias[0] += 1
    with pytest.raises(TrainingError, match=r"another run, with other model \("):
        measure(live, tmp_path)


def test_a_damaged_table_is_refused(live, tmp_path):
    measure(live, tmp_path)
    path = tmp_path / "table.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TrainingError, match="damaged"):
        measure(live, tmp_path)


def test_a_broken_model_is_refused_and_leaves_no_table(live, tmp_path):
    with torch.no_grad():
        live.model.backbone.blocks[4].mlp.up_proj.weight.fill_(torch.nan)
    with pytest.raises(TrainingError, match="NaN or infinite"):
        measure(live, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_router_is_refused():
    from buddy import BuddyForCausalLM

    with pytest.raises(RecipeError, match="no router"):
        RewardModel(BuddyForCausalLM(tiny_model()))


def test_lookup_by_hand():
    rows = examples(2)
    table = LossTable(rows, torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 2], [3, 4]]))
    assert table.summaries(rows[::-1]).tolist() == [[2.0], [1.0]]
    # k = blocks - 2
    assert table.losses(rows[::-1], torch.tensor([[4, 3], [3, 3]])).tolist() == [[4, 3], [1, 1]]
