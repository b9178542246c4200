"""Weights that stay in their file until they are converted."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

from buddy import BuddyForCausalLM
from buddy.backbone.quantised import quantise_backbone
from buddy.hub import mapped_load
from buddy.hub.mapped_load import MappedWeights
from buddy.hub.weights import open_weights
from tests.tiny import random_ids, tiny_model


@pytest.fixture
def weights(tmp_path):
    draw = torch.Generator().manual_seed(0)
    made = {
        "large": torch.randn(300, 40, generator=draw),
        "small": torch.randn(3, generator=draw).bfloat16(),
    }
    save_file(made, tmp_path / "model.safetensors")
    mapped = MappedWeights()
    with open_weights(tmp_path) as tensors:
        return made, mapped, mapped.map(tmp_path, tensors)


def test_tensors_are_those_of_the_file(weights):
    made, _, tensors = weights
    assert tensors.keys() == made.keys()
    for name, tensor in made.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_released_pages_are_read_again_and_what_was_written_is_gone(weights):
    made, mapped, tensors = weights
    large = tensors["large"]
    large.zero_()
    mapped.release(large)
    middle = slice(150, 160)  # beyond the first and the last page, which it shares with others
    assert torch.equal(large[middle], made["large"][middle])
    elsewhere = torch.ones(10_000)
    mapped.release(elsewhere)
    assert bool((elsewhere == 1).all())


def test_a_model_owns_its_weights_and_ties_in_the_end(weights, monkeypatch):
    monkeypatch.setattr(mapped_load, "_AT_ONCE", 1000)
    made, mapped, tensors = weights
    model = nn.ModuleList([nn.Linear(40, 300, bias=False) for _ in range(2)])
    for layer in model:
        layer.weight.data = tensors["large"]
    mapped.own(model)
    tensors["large"].zero_()
    first, second = (layer.weight for layer in model)
    assert torch.equal(first, made["large"])
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "llama3"])  # the second has tied embeddings
@pytest.mark.parametrize("targets", [None, ["q_proj", "up_proj"], ["q_proj", "lm_head"]])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT's
def test_a_model_that_is_quantised_as_it_loads_is_the_one_that_is_quantised_after(
    family, quant, targets, tmp_path
):
    model = tiny_model(family)
    if targets is not None:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=targets)).eval()
        for name, weight in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(weight, std=0.2)
    BuddyForCausalLM(model, policy="full").save_pretrained(tmp_path / "model")
    options = {"device": "cpu", "merge_adapter": True}
    loaded = BuddyForCausalLM.from_pretrained(tmp_path / "model", quant=quant, **options)
    after = BuddyForCausalLM.from_pretrained(tmp_path / "model", **options)
    assert loaded.facts() == after.facts()
    quantise_backbone(after.backbone, quant)
    ids = random_ids(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, after(ids).logits)
