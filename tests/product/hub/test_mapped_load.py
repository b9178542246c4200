"""Weights that stay in their file until they are converted."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from buddy import BuddyForCausalLM
from buddy.backbone.quantised import quantise_backbone
from buddy.hub import mapped_load
from buddy.hub.mapped_load import MappedWeights
from buddy.hub.weights import open_weights
from tests.tiny import random_ids, tiny_model
from tests.words import word_tokenizer


@pytest.fixture
def weights(tmp_path):
    draw = torch.Generator().manual_seed(0)
    made = {
        "large": torch.randn(300, 40, generator=draw),
        "small": torch.randn(3, generator=draw).bfloat16(),
    }
    save_file(made, tmp_path / "model.safetensors")
    with open_weights(tmp_path) as tensors:
        mapped = MappedWeights(tmp_path, tensors)
    return made, mapped


def test_tensors_are_those_of_the_file(weights):
    made, mapped = weights
    assert mapped.tensors.keys() == made.keys()
    for name, tensor in made.items():
        assert mapped.tensors[name].dtype == tensor.dtype
        assert torch.equal(mapped.tensors[name], tensor)


def test_released_pages_are_read_again_and_what_was_written_is_gone(weights):
    made, mapped = weights
    large = mapped.tensors["large"]
    large.zero_()
    mapped.release(large)
    middle = slice(150, 160)  # beyond the first and the last page, which it shares with others
    assert torch.equal(large[middle], made["large"][middle])
    elsewhere = torch.ones(10_000)
    mapped.release(elsewhere)
    assert bool((elsewhere == 1).all())


def test_a_model_owns_its_weights_and_ties_in_the_end(weights, monkeypatch):
    monkeypatch.setattr(mapped_load, "_AT_ONCE", 1000)
    made, mapped = weights
    model = nn.ModuleList([nn.Linear(40, 300, bias=False) for _ in range(2)])
    for layer in model:
        layer.weight.data = mapped.tensors["large"]
    mapped.own(model)
    mapped.tensors["large"].zero_()
    first, second = (layer.weight for layer in model)
    assert torch.equal(first, made["large"])
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_a_model_that_is_quantised_as_it_loads_is_the_one_that_is_quantised_after(quant, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    loaded = BuddyForCausalLM.from_pretrained(tmp_path, quant=quant, device="cpu")
    after = BuddyForCausalLM.from_pretrained(tmp_path, device="cpu")
    quantise_backbone(after.backbone, quant)
    ids = random_ids(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, after(ids).logits)
