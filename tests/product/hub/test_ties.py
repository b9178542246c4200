"""Weights that are one: an output projection of its own is never replaced by the embedding."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open

from buddy import BuddyForCausalLM
from buddy.backbone.quantised import quantise_backbone
from tests.tiny import random_ids, tiny_model

IDS = random_ids(2, 9)


@pytest.fixture
def mistaken(tmp_path):
    """An untied model whose config says that it is tied."""
    tiny_model().save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    return tmp_path / "model"


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def tie(model):
    """All that transformers, PEFT and lm-eval might call."""
    model.tie_weights()
    model.model.tie_weights()


def test_a_head_of_its_own_stays_whatever_the_config_says(mistaken):
    model = BuddyForCausalLM.from_pretrained(mistaken)
    expected = BuddyForCausalLM(tiny_model())
    assert torch.equal(logits(model), logits(expected))
    tie(model)
    assert torch.equal(logits(model), logits(expected))
    assert not model.config.tie_word_embeddings


@pytest.mark.parametrize("origin", ["wrapped", "loaded"])
def test_what_is_saved_of_it_says_the_truth(mistaken, tmp_path, origin):
    if origin == "loaded":
        model = BuddyForCausalLM.from_pretrained(mistaken)
    else:
        hf_model = tiny_model()
        hf_model.config.tie_word_embeddings = True
        model = BuddyForCausalLM(hf_model)
    model.save_pretrained(tmp_path / "saved", include_backbone=True)
    written = json.loads((tmp_path / "saved" / "backbone" / "config.json").read_text())
    assert not written["tie_word_embeddings"]
    with safe_open(tmp_path / "saved" / "backbone" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" in file.keys()  # noqa: SIM118


@pytest.mark.parametrize("family", ["llama3", "qwen2.5"])  # both are tied
def test_a_quantised_head_stays(family):
    model = BuddyForCausalLM(tiny_model(family))
    quantise_backbone(model.backbone, "int8")
    before = logits(model)
    tie(model)
    assert torch.equal(logits(model), before)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT's
def test_tied_weights_stay_one_and_so_does_an_adapters():
    for adapter in (None, LoraConfig(r=2, target_modules=["q_proj", "lm_head"])):
        tied = tiny_model("llama3")
        hf_model = tied if adapter is None else get_peft_model(tied, adapter).eval()
        model = BuddyForCausalLM(hf_model)
        names = set(model.state_dict())
        before = logits(model)
        model.tie_weights()
        assert torch.equal(logits(model), before)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert set(model.state_dict()) == names
