"""A family row is a claim that is asked when a model is loaded, once."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformers.models.phi3 import Phi3Config

from buddy import BuddyForCausalLM
from buddy.backbone import families
from buddy.backbone.backbone import Backbone
from buddy.backbone.families import FAMILIES, find_family
from buddy.backbone.quantised import quantise_backbone
from buddy.backbone.verify import verify_backbone
from buddy.errors import FamilyError, ModelError, PromptError
from buddy.hub import verified
from buddy.hub.loading import load_model
from buddy.hub.place import find_model
from tests.tiny import CONFIGS, all_families, random_ids, tiny_model


def disguise(monkeypatch, family, **changes):
    """Have the row of a family say something else."""
    row = replace(FAMILIES[family], **changes)
    monkeypatch.setattr(families, "FAMILIES", {**FAMILIES, family: row})


@pytest.fixture
def times(monkeypatch, tmp_path):
    """The models that were verified, in an empty cache."""
    seen = []
    monkeypatch.setattr(verified, "cache_home", lambda: tmp_path / "home")
    real = verified.verify_backbone
    monkeypatch.setattr(verified, "verify_backbone", lambda b: (seen.append(b), real(b)))
    return seen


@all_families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_is_computed_as_its_row_says(family, dtype):
    verify_backbone(Backbone(tiny_model(family).to(dtype)))


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("gemma2", {"logits_cap": None}, "logits differ"),
        ("gemma2", {"window": None}, "logits differ"),
        ("gemma3_text", {"logits_cap": None}, "logits differ"),
        ("gemma3_text", {"key_norm": None}, "keys of block 0 differ"),
        ("granite", {"embedding_scale": None}, "logits differ"),
        ("granite", {"logits_divisor": None}, "logits differ"),
        ("olmo", {"clip": None}, "keys of block 0 differ"),
        ("smollm3", {"rotates": None}, "keys of block 1 differ"),
    ],
)
def test_a_row_that_is_wrong_is_refused(monkeypatch, family, changes, says):
    disguise(monkeypatch, family, **changes)
    with pytest.raises(FamilyError, match=says) as refused:
        verify_backbone(Backbone(tiny_model(family)))
    assert f"row '{family}' of FAMILIES" in str(refused.value)


def test_a_granite_that_passes_for_a_llama_is_not_loaded(monkeypatch, tmp_path, times):
    tiny_model("granite").save_pretrained(tmp_path / "granite")
    monkeypatch.setattr(families, "FAMILIES", {**FAMILIES, "granite": FAMILIES["llama"]})
    for _ in range(2):  # what was refused is not remembered as right
        with pytest.raises(FamilyError, match="differ by up to"):
            BuddyForCausalLM.from_pretrained(tmp_path / "granite")
    assert len(times) == 2


def test_a_model_is_verified_once_in_each_form(tmp_path, times):
    tiny_model("granite").save_pretrained(tmp_path / "granite")
    for _ in range(2):
        load_model(find_model(tmp_path / "granite"), device="cpu")
    assert len(times) == 1
    load_model(find_model(tmp_path / "granite"), device="cpu", dtype=torch.bfloat16)
    load_model(find_model(tmp_path / "granite"), device="cpu", attention="eager")
    assert len(times) == 3
    tiny_model("granite", seed=1).save_pretrained(tmp_path / "other")
    load_model(find_model(tmp_path / "other"), device="cpu")
    assert len(times) == 4


@pytest.mark.parametrize("damage", ["", "[]", '{"key": "of another"}', "\udc80"])
def test_a_damaged_entry_is_not_believed(tmp_path, times, damage):
    tiny_model().save_pretrained(tmp_path / "tiny")
    load_model(find_model(tmp_path / "tiny"), device="cpu")
    (entry,) = (tmp_path / "home" / "verified").iterdir()
    entry.write_bytes(damage.encode(errors="surrogateescape"))
    for expected in (2, 2):  # and is written again
        load_model(find_model(tmp_path / "tiny"), device="cpu")
        assert len(times) == expected


def test_without_a_cache_a_model_is_verified_each_time(tmp_path, times):
    (tmp_path / "home").write_text("no folder")
    tiny_model().save_pretrained(tmp_path / "tiny")
    for _ in range(2):
        load_model(find_model(tmp_path / "tiny"), device="cpu")
    assert len(times) == 2


def test_a_model_in_training_mode_is_not_compared():
    with pytest.raises(ModelError, match="eval"):
        verify_backbone(Backbone(tiny_model().train()))


@all_families
def test_logits_of_some_tokens_are_those_among_all(family):
    backbone = Backbone(tiny_model(family))
    torch.manual_seed(0)
    hidden, tokens = torch.randn(3, 32), torch.tensor([4, 5, 90])
    with torch.no_grad():
        assert_close(backbone.logits_of(hidden, tokens), backbone.logits(hidden)[:, tokens])


@all_families
def test_values_are_those_projected(family):
    backbone = Backbone(tiny_model(family))
    torch.manual_seed(0)
    hidden, positions = torch.randn(5, 32), torch.tensor([3, 0, 9, 9, 1])
    with torch.no_grad():
        _, values = backbone.project(2, hidden, positions)
        assert torch.equal(backbone.values(2, hidden), values.flatten(1))


def test_keys_and_values_are_read_from_a_fused_layer_of_any_kind():
    backbone = Backbone(tiny_model("phi3"))
    quantise_backbone(backbone, "int8")
    verify_backbone(backbone)


def test_capped_scores_in_sdpa_and_attention_to_what_follows_are_refused(tmp_path):
    model = tiny_model("gemma2")
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ModelError, match=r'does not compute Gemma 2.*"eager"'):
        Backbone(model)
    model.config._attn_implementation = "eager"
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="attention must be eager for Gemma 2, got 'sdpa'"):
        load_model(find_model(tmp_path), attention="sdpa")
    assert load_model(find_model(tmp_path), device="cpu").config._attn_implementation == "eager"
    model.config.use_bidirectional_attention = True
    with pytest.raises(FamilyError, match="use_bidirectional_attention"):
        find_family(model.config)


def test_where_longrope_changes_its_angles_is_the_end(monkeypatch):
    changes = {
        "original_max_position_embeddings": 20,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
        },
    }
    monkeypatch.setitem(CONFIGS, "phi3", Phi3Config(**CONFIGS["phi3"].to_dict() | changes))
    model = tiny_model("phi3")
    buddy = BuddyForCausalLM(model)
    ids = random_ids(1, 20)
    with torch.no_grad():
        out = buddy(ids, budget=1.0)
        assert_close(out.logits, model(ids).logits)
        with pytest.raises(PromptError, match="21 tokens, but the model's context holds 20"):
            buddy(ids[:, :1], budget=1.0, cache=out.cache)


@pytest.mark.parametrize("window", [0, -3, 2.5, True, "5"])
def test_a_sliding_window_of_no_tokens_is_refused(window):
    """The engines made different things of it."""
    model = tiny_model("mistral")
    vars(model.config)["sliding_window"] = window
    with pytest.raises(FamilyError, match="sliding_window must be a number of tokens of at least"):
        BuddyForCausalLM(model)
