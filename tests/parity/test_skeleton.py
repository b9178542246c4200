"""A skeleton computes what transformers' model of the same folder computes, bit for bit."""

import json
import shutil

import pytest
import torch
from torch.testing import assert_close

from buddy.backbone.backbone import Backbone
from buddy.backbone.fingerprint import base_fingerprint
from buddy.backbone.quantised import quantise_backbone
from buddy.backbone.skeleton import Skeleton
from buddy.errors import CheckpointError
from buddy.generation.answer import needs_generate
from buddy.hub.loading import load_model
from buddy.hub.noted import load_quickly, outline_quickly
from buddy.hub.place import find_model
from buddy.inference import InferenceModel
from buddy.model import BuddyForCausalLM
from tests.tiny import FAMILY_NAMES, random_ids, random_router, tiny_model

EXACT = {"rtol": 0, "atol": 0}
WITH_SKELETON = tuple(name for name in FAMILY_NAMES if name != "llama3")


def saved(name, folder):
    tiny_model(name).save_pretrained(folder)
    return find_model(str(folder))


def known(place):
    """The skeleton of a model that was loaded once before."""
    assert not isinstance(load_quickly(place, device="cpu"), Skeleton)
    skeleton = load_quickly(place, device="cpu")
    assert isinstance(skeleton, Skeleton)
    return skeleton


@torch.no_grad()
@pytest.mark.parametrize("name", WITH_SKELETON)
def test_every_part_computes_the_same(name, tmp_path):
    place = saved(name, tmp_path)
    ours, theirs = known(place), load_model(place, device="cpu")
    names = [name for name, _ in ours.named_parameters()]
    assert names == [name for name, _ in theirs.named_parameters()]
    assert base_fingerprint(ours) == base_fingerprint(theirs)
    skeleton, whole = Backbone(ours), Backbone(theirs)
    assert skeleton.shape() == whole.shape()
    assert skeleton.windows == whole.windows
    ids, positions = random_ids(1, 9), torch.arange(9)[None]
    hidden = whole.embed(ids)
    assert_close(skeleton.embed(ids), hidden, **EXACT)
    rotary = whole.rotary(hidden, positions)
    assert_close(skeleton.rotary(hidden, positions), rotary, **EXACT)
    for block in range(whole.num_blocks):
        projected = whole.project(block, hidden[0], positions[0])
        assert_close(skeleton.project(block, hidden[0], positions[0]), projected, **EXACT)
        inputs = (block, hidden, None, positions, rotary, None)
        hidden = whole.run_block(*inputs)
        assert_close(skeleton.run_block(*inputs), hidden, **EXACT)
    assert_close(skeleton.logits(hidden), whole.logits(hidden), **EXACT)


@torch.no_grad()
def test_the_mlp_can_be_watched_and_layers_be_quantised(tmp_path):
    place = saved("qwen3", tmp_path)
    skeleton, whole = Backbone(known(place)), Backbone(load_model(place, device="cpu"))
    for backbone in (skeleton, whole):
        quantise_backbone(backbone, "int8")
    ids, positions = random_ids(1, 5), torch.arange(5)[None]
    hidden = whole.embed(ids)
    inputs = (1, hidden, None, positions, whole.rotary(hidden, positions), None)
    with skeleton.watched_mlp(1) as ours, whole.watched_mlp(1) as theirs:
        assert_close(skeleton.run_block(*inputs), whole.run_block(*inputs), **EXACT)
    assert len(ours) == 1
    assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("engine", ["native", "general"])
def test_a_checkpoint_runs_alike(engine, tmp_path):
    tiny_model("llama-mha").save_pretrained(tmp_path / "base")
    base = BuddyForCausalLM.from_pretrained(tmp_path / "base")
    routed = BuddyForCausalLM(base.model, router=random_router(base.model), origin=base.origin)
    routed.save_pretrained(tmp_path / "routed")
    whole = BuddyForCausalLM.from_pretrained(tmp_path / "routed", engine=engine)
    InferenceModel.load(tmp_path / "routed", engine=engine)
    model = InferenceModel.load(tmp_path / "routed", engine=engine)
    assert isinstance(model.model, Skeleton)
    assert isinstance(InferenceModel.describe(tmp_path / "routed").model, Skeleton)
    assert model.facts() == whole.facts()
    ids = random_ids(2, 7)
    for budget in ("4 blocks", 1.0):
        with torch.no_grad():
            ours, theirs = model(ids, budget=budget), whole(ids, budget=budget)
            assert torch.equal(ours.plan.mask, theirs.plan.mask)
            assert_close(ours.logits, theirs.logits, **EXACT)
            following = random_ids(2, 1, seed=3)
            ours = model(following, cache=ours.cache, budget=budget)
            theirs = whole(following, cache=theirs.cache, budget=budget)
        assert_close(ours.logits, theirs.logits, **EXACT)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_an_outline_knows_what_the_makers_wish(name, tmp_path):
    model = tiny_model(name)
    model.generation_config.repetition_penalty = 1.3
    model.save_pretrained(tmp_path)
    place = find_model(str(tmp_path))
    for _ in range(2):
        outline = outline_quickly(place)
        assert needs_generate(outline.generation_config)
        loaded = load_quickly(place, device="cpu")
        assert outline.generation_config.to_dict() == loaded.generation_config.to_dict()


@pytest.mark.parametrize("name", ["llama3", "gemma", "phi3"])
def test_other_models_have_none(name, tmp_path):
    place = saved(name, tmp_path)
    for _ in range(2):
        assert not isinstance(load_quickly(place, device="cpu"), Skeleton)
        assert not isinstance(outline_quickly(place), Skeleton)


@pytest.mark.parametrize(
    "options", [{"attention": "eager"}, {"dtype": torch.bfloat16}, {"device": "meta"}]
)
def test_what_a_skeleton_cannot_have_is_loaded_whole(options, tmp_path, monkeypatch):
    place = saved("llama", tmp_path)
    known(place)
    seen = []
    monkeypatch.setattr("buddy.hub.noted.load_model", lambda place, **given: seen.append(given))
    monkeypatch.setattr("buddy.hub.noted.pick_devices", lambda device: [torch.device(device)])
    with pytest.raises(AttributeError):  # of the model that was not loaded
        load_quickly(place, **{"device": "cpu", **options}).device  # noqa: B018
    assert seen[0].items() >= options.items()


def test_other_weights_of_the_same_config_are_verified_again(tmp_path, monkeypatch):
    monkeypatch.setattr("buddy.hub.verified.cache_home", lambda: tmp_path / "home")
    place = saved("llama", tmp_path / "model")
    known(place)
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "model")
    whole = load_quickly(place, device="cpu")
    assert not isinstance(whole, Skeleton)
    assert isinstance(load_quickly(place, device="cpu"), Skeleton)


def test_weights_that_do_not_fit_are_refused_as_ever(tmp_path):
    place = saved("llama", tmp_path / "llama")
    known(place)
    saved("llama-mha", tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "llama")
    with pytest.raises(CheckpointError, match="do not fit its config"):
        load_quickly(place, device="cpu")


@pytest.mark.parametrize("damage", ["not JSON", "[]", "{}", '{"content": 3, "digest": 3}'])
def test_a_damaged_note_is_as_none(damage, tmp_path, monkeypatch):
    monkeypatch.setattr("buddy.hub.notes.cache_home", lambda: tmp_path / "home")
    place = saved("llama", tmp_path / "model")
    known(place)
    (note,) = (tmp_path / "home" / "noted").iterdir()
    note.write_text(damage)
    known(place)


@pytest.mark.parametrize("changed", [("rms_norm_eps", 1e-3), ("hidden_size", -1), ("head_dim", [])])
def test_a_note_that_says_something_else_is_as_none(changed, tmp_path, monkeypatch):
    monkeypatch.setattr("buddy.hub.notes.cache_home", lambda: tmp_path / "home")
    place = saved("llama", tmp_path / "model")
    known(place)
    (note,) = (tmp_path / "home" / "noted").iterdir()
    noted = json.loads(note.read_text())
    noted["content"]["values"] |= dict([changed])
    note.write_text(json.dumps(noted))
    assert not isinstance(outline_quickly(place), Skeleton)
    assert not isinstance(load_quickly(place, device="cpu"), Skeleton)
