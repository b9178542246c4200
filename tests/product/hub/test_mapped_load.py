"""Weights that stay in their file until they are converted."""

import gc

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
        return made, mapped, mapped.map(tmp_path, tensors, torch.float32)


def test_tensors_are_those_of_the_file_in_the_number_format_that_is_asked_for(weights, tmp_path):
    made, _, of_float32 = weights
    with open_weights(tmp_path) as tensors:
        of_bfloat16 = MappedWeights().map(tmp_path, tensors, torch.bfloat16)
    assert (list(of_float32), list(of_bfloat16)) == (["large"], ["small"])
    for name, tensor in (of_float32 | of_bfloat16).items():
        assert tensor.dtype == made[name].dtype
        assert torch.equal(tensor, made[name])


def test_memory_that_is_taken_when_no_tensor_is_mapped_any_more_is_not_released(tmp_path):
    large = 9 * 2**20  # the C library maps memory of its own for each
    save_file({"large": torch.zeros(large)}, tmp_path / "model.safetensors")
    mapped = MappedWeights()
    with open_weights(tmp_path) as tensors:
        mapped.map(tmp_path, tensors, torch.float32).clear()
    gc.collect()
    made = [torch.ones(large) for _ in range(2)]
    for tensor in made:
        mapped.release(tensor)
    assert all(bool((tensor == 1).all()) for tensor in made)


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
    quantise_backbone(after.backbone, quant)
    assert loaded.facts() == after.facts()
    ids = random_ids(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, after(ids).logits)
