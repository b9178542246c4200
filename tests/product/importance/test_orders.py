"""Removal orders: by hand, against published orders, and measured without a break or with one."""

import json

import pytest
import torch

from buddy.backbone.backbone import Backbone
from buddy.depth.policy import PolicyResources
from buddy.errors import ModelError, PolicyError, ResultError
from buddy.importance.calibration import cut_windows, read_text
from buddy.importance.indicators.indicator import build_indicator
from buddy.importance.indicators.measure import measure
from buddy.importance.search.orders import ascending_order, shortened_llama_protected
from buddy.policies.registry import build_policy
from buddy.records import RunRecord
from tests.tiny import NUM_BLOCKS, random_ids, tiny_model


def test_order_by_hand_with_ties_and_protected_blocks():
    scores = [0.0, 5.0, 1.0, 1.0, 3.0, 0.5]
    assert ascending_order(scores) == [0, 5, 3, 2, 4, 1]
    assert ascending_order(scores, protected=(0, 5)) == [3, 2, 4, 1, 0, 5]


# Shortened LLaMA's published removal order of Llama-2-7B by PPL: the last six are the blocks
# that its "+" rule protects, so they sort last whatever their score.
LLAMA_2_PPL = [
    *[11, 8, 24, 21, 12, 7, 9, 10, 18, 27, 14, 23, 25, 15, 20, 26, 17, 6, 13, 28, 22, 19, 5],
    *[29, 4, 16, 30, 3, 2, 31, 1, 0],
]


def test_the_plus_rule_protects_the_first_four_and_last_two():
    scores = [float(LLAMA_2_PPL.index(block)) for block in range(32)]
    assert ascending_order(scores) == LLAMA_2_PPL
    protected = shortened_llama_protected(32)
    assert protected == (0, 1, 2, 3, 30, 31)
    free = ascending_order(scores, protected)[:26]
    assert free == [block for block in LLAMA_2_PPL if block not in protected]


def test_an_interrupted_measurement_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("buddy.resume.SAVE_EVERY_S", 0.0)
    backbone, ids = Backbone(tiny_model()), random_ids(6, 8)
    whole = measure(build_indicator("taylor", backbone), ids, batch=2)
    file = tmp_path / "partial.safetensors"

    class Stop(Exception):
        pass

    def stop_after_four(done, total):
        if done == 6:
            raise Stop

    with pytest.raises(Stop):
        measure(
            build_indicator("taylor", backbone), ids, batch=2, resume=file, on_batch=stop_after_four
        )
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    with pytest.raises(ResultError, match="another measurement"):
        measure(build_indicator("taylor", backbone), ids + 1, batch=2, resume=file)
    told = []
    resumed = measure(
        build_indicator("taylor", backbone),
        ids,
        batch=2,
        resume=file,
        on_batch=lambda done, total: told.append(done),
    )
    assert torch.equal(resumed, whole)
    assert told == [4, 6]
    assert list(tmp_path.iterdir()) == [file]  # until whoever asked has kept the scores
    file.write_bytes(b"nonsense")
    with pytest.raises(ResultError, match="damaged"):
        measure(build_indicator("taylor", backbone), ids, batch=2, resume=file)


def test_importance_that_is_no_number_is_refused():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e5)  # so that a token's loss is above the 709 nats of float64
    with pytest.raises(ModelError, match=r"importance of block 0 is not a finite number.*; load"):
        measure(build_indicator("delta-ppl", Backbone(model)), random_ids(2, 8))


def tokenizer_that_begins(bos):
    """A tokenizer of letters that puts a token before each text."""

    def tokenizer(text, add_special_tokens=True, **options):
        return {"input_ids": [bos] * add_special_tokens + [ord(c) for c in text]}

    tokenizer.bos_token_id = bos
    return tokenizer


def test_calibration_text_is_cut_into_whole_windows(tmp_path):
    def tokenizer(text, **options):
        return {"input_ids": [ord(c) for c in text]}

    windows = cut_windows(tokenizer, "abcdefgh", tokens=3)
    assert windows.tolist() == [[97, 98, 99], [100, 101, 102]]
    notes = []
    first = cut_windows(tokenizer, "abcdefgh", tokens=3, limit=1, note=notes.append)
    assert first.tolist() == [[97, 98, 99]]
    assert notes == []
    assert len(cut_windows(tokenizer, "abcdefgh", tokens=3, limit=4, note=notes.append)) == 2
    assert notes == ["the text fills 2 of the 4 windows of 3 tokens asked for"]
    long = "a word of more than 16 characters ".replace(" ", "_") * 2
    words = cut_windows(
        lambda text, **options: {"input_ids": [len(word) for word in text.split()]},
        f"{long} " * 9,
        tokens=3,
        limit=2,
    )
    assert words.tolist() == [[len(long)] * 3] * 2
    begins = tokenizer_that_begins(5)
    assert cut_windows(begins, "abcdefgh", tokens=3).tolist() == [
        [5, 97, 98],
        [5, 99, 100],
        [5, 101, 102],
        [5, 103, 104],
    ]
    with pytest.raises(ResultError, match="2 tokens, less than one window of 3"):
        cut_windows(tokenizer, "ab", tokens=3)
    with pytest.raises(ResultError, match="cannot be read"):
        read_text(str(tmp_path / "none.txt"))
    with pytest.raises(ResultError, match="--data-dir"):
        read_text("wikitext2")
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2/valid.txt").write_text(" \n")
    with pytest.raises(ResultError, match="is empty"):
        read_text("wikitext2", tmp_path)


def test_a_record_orders_the_static_policy(tmp_path):
    path = tmp_path / "order.json"
    record = RunRecord(
        kind="importance-test", config={}, results={"removal_order": [3, 1]}, model=None
    )
    record.save(path)
    resources = PolicyResources(num_blocks=NUM_BLOCKS)
    policy = build_policy(f"static:{path}", resources)
    assert policy.removal_order == (3, 1)
    assert "importance-test" in policy.describe()
    for content, error, says in (
        ("{", ResultError, "no JSON"),
        ("{}", ResultError, "no RunRecord"),
        (json.dumps({"kind": "x", "config": {}, "results": {}}), PolicyError, "removal_order"),
    ):
        path.write_text(content)
        with pytest.raises(error, match=says):
            build_policy(f"static:{path}", resources)
    with pytest.raises(ResultError, match="cannot be read"):
        build_policy(f"static:{tmp_path / 'none.json'}", resources)
