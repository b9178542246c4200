"""A name is resolved once, and what loads takes what was found."""

import json

import pytest
import torch

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.checkpoint import resolve as resolving
from buddy.checkpoint.resolve import resolve, shipped_checkpoint
from buddy.errors import CheckpointError, ModelError
from buddy.hub import presets
from buddy.hub.presets import DEFAULT_MODEL, ROUTED_MODEL, Preset
from buddy.hub.tokenizer import tokenizer_fingerprint
from tests.hostile.folders import word_tokenizer
from tests.tiny import tiny_model


@pytest.fixture
def base(tmp_path):
    """A folder of a base model."""
    tiny_model().save_pretrained(tmp_path / "base")
    word_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize(
    ("name", "kind", "where", "source", "key"),
    [
        (DEFAULT_MODEL, "published", DEFAULT_MODEL, DEFAULT_MODEL, DEFAULT_MODEL),
        ("qwen3-0.6b", "hub", "Qwen/Qwen3-0.6B", "qwen3-0.6b", "Qwen/Qwen3-0.6B"),
        ("org/name", "hub", "org/name", "org/name", "org/name"),
    ],
)
def test_a_name_says_what_it_is_and_where_it_lies(name, kind, where, source, key):
    found = resolve(name)
    assert (found.base.kind, found.base.where, found.base.source) == (kind, where, source)
    assert (found.name, found.key, found.checkpoint) == (name, key, None)


def test_a_path_is_found_again_from_any_folder(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for name, kind in (("base", "folder"), ("model.gguf", "gguf")):
        found = resolve(name)
        assert (found.base.kind, found.base.where) == (kind, name)
        assert found.base.source == found.key == str(tmp_path / name)


def test_a_checkpoint_names_its_base(base, tmp_path):
    BuddyForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "tuned")
    found = resolve(tmp_path / "tuned")
    assert found.checkpoint.folder == tmp_path / "tuned"
    assert (found.base.kind, found.base.source) == ("folder", str(base))
    assert found.key == str(tmp_path / "tuned")
    shipped = resolve(ROUTED_MODEL)
    assert shipped.checkpoint.folder == shipped_checkpoint(ROUTED_MODEL)
    assert (shipped.base.name, shipped.key) == (DEFAULT_MODEL, ROUTED_MODEL)


def test_a_checkpoint_of_its_own_backbone_lies_whole_in_its_folder(tmp_path):
    model = BuddyForCausalLM(tiny_model(), policy="random")
    model.save_pretrained(tmp_path / "whole", tokenizer=word_tokenizer())
    assert resolve(tmp_path / "whole").base.where == str(tmp_path / "whole/backbone")


def test_every_loader_resolves_once_and_takes_what_was_found(base, tmp_path, monkeypatch):
    BuddyForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "tuned")
    found, asked = resolve(tmp_path / "tuned"), []
    plain = resolving.find_model

    def watched(name):
        asked.append(name)
        return plain(name)

    monkeypatch.setattr(resolving, "find_model", watched)
    for load in (BuddyForCausalLM.from_pretrained, BuddyForCausalLM.outline, load_tokenizer):
        asked.clear()
        load(tmp_path / "tuned")
        assert asked == [str(base)]
        load(found)
        assert asked == [str(base)]
    assert resolve(found) is found


def test_a_part_that_no_model_has_is_refused():
    with pytest.raises(TypeError, match="a model has no part 'ruoter': expected prior, router"):
        BuddyForCausalLM(tiny_model(), ruoter=None)


def test_nothing_is_called_so():
    for name in ("nonsense", "./nowhere", "a" * 300):
        with pytest.raises(ModelError, match="no model"):
            resolve(name)


def test_a_hub_id_stands_for_what_ships_for_it_unless_a_folder_or_a_revision_is_meant(
    tmp_path, monkeypatch
):
    routed = Preset("org", "Model-0.1B", 30, 1, None, trained="smollm2-135m")
    monkeypatch.setitem(presets.PRESETS, "model-0.1b", routed)
    monkeypatch.chdir(tmp_path)
    folder = shipped_checkpoint(ROUTED_MODEL)
    for name in ("model-0.1b", "org/Model-0.1B"):
        assert resolve(name).checkpoint.folder == folder
        assert resolve(name).key == name
    assert resolve("org/Model-0.1B@main").checkpoint is None
    tiny_model().save_pretrained(tmp_path / "org/Model-0.1B")
    assert resolve("org/Model-0.1B").checkpoint is None
    assert resolve("model-0.1b").checkpoint.folder == folder


@pytest.fixture
def published(base, tmp_path):
    """A checkpoint for weights that go by one name in several number formats."""
    BuddyForCausalLM.from_pretrained(base, policy="random").save_pretrained(tmp_path / "routed")
    _edit_base(tmp_path / "routed", fingerprint=None, tokenizer=_fingerprint(base))
    return tmp_path / "routed"


def _fingerprint(base):
    return tokenizer_fingerprint(load_tokenizer(base))


def _edit_base(folder, **changed):
    manifest = json.loads((folder / "buddy.json").read_text())
    manifest["base"] |= changed
    (folder / "buddy.json").write_text(json.dumps(manifest))


def test_weights_of_another_format_are_taken_where_the_tokenizer_is_the_same(published, base):
    other = tiny_model()
    with torch.no_grad():
        other.lm_head.weight.add_(0.01)
    other.save_pretrained(base)
    model = BuddyForCausalLM.from_pretrained(published)
    assert model.policy.name == "random"
    torch.testing.assert_close(model.model.lm_head.weight, other.lm_head.weight)


def test_weights_of_any_format_must_have_the_tokenizer(published, base):
    _edit_base(published, tokenizer="0" * 64)
    with pytest.raises(CheckpointError, match="its tokenizer makes other tokens of a text"):
        BuddyForCausalLM.from_pretrained(published)
    _edit_base(published, tokenizer=None)
    with pytest.raises(CheckpointError, match="expected the fingerprint of its weights or its"):
        BuddyForCausalLM.from_pretrained(published)


def test_weights_of_any_format_must_have_the_shapes(published, base):
    tiny_model("qwen2").save_pretrained(base)
    with pytest.raises(CheckpointError, match="model_type is"):
        BuddyForCausalLM.from_pretrained(published)


def test_saving_again_names_the_weights_that_were_loaded(published, tmp_path):
    BuddyForCausalLM.from_pretrained(published).save_pretrained(tmp_path / "again")
    base = json.loads((tmp_path / "again/buddy.json").read_text())["base"]
    assert base["fingerprint"] is not None
    BuddyForCausalLM.from_pretrained(tmp_path / "again")
