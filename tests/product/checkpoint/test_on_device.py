"""Saving, loading and exporting on a pretended GPU: the files are the CPU's."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from buddy import BuddyForCausalLM
from buddy.export.folder import export_model
from tests.methods.adainfer.test_policy import classifier
from tests.pretend import OnDevice, PretendDevice, move
from tests.product.generation.test_ledger_budget import with_ledger
from tests.product.policies.made import gated, random_pudding
from tests.tiny import random_ids, random_router, tiny_buddy, tiny_model
from tests.words import word_tokenizer


def adapted():
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return BuddyForCausalLM(model.eval(), router=random_router(tiny_model()))


MODELS = {
    "predictor": lambda: tiny_buddy(predictor=True, engine="general"),
    "ledger": with_ledger,
    "adapted": adapted,
    "d-llm": lambda: gated("d-llm"),
    "pudding": lambda: BuddyForCausalLM(tiny_model(), learned=random_pudding()),
    "adainfer": lambda: BuddyForCausalLM(tiny_model(), learned=classifier()),
}


def contents(folder):
    """Bytes of each file of weights."""
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")
    }


@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_is_what_the_cpu_saves(name, tmp_path):
    MODELS[name]().save_pretrained(tmp_path / "here", tokenizer=word_tokenizer())
    model = MODELS[name]()
    with PretendDevice():
        move(model).save_pretrained(tmp_path / "there", tokenizer=word_tokenizer())
    assert len(contents(tmp_path / "here")) >= 2
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


@pytest.mark.parametrize("name", ["predictor", "ledger", "adapted", "d-llm"])
def test_a_checkpoint_is_loaded_to_the_device(name, tmp_path, monkeypatch):
    MODELS[name]().save_pretrained(tmp_path, tokenizer=word_tokenizer())
    options = {"engine": "general", "merge_adapter": name == "adapted"}
    expected = BuddyForCausalLM.from_pretrained(tmp_path, device="cpu", **options)
    monkeypatch.setattr("buddy.hub.loading.pick_device", torch.device)
    answer = {"max_new_tokens": 3, "do_sample": False}
    if name != "d-llm":  # which takes no budget
        answer["budget"] = 0.7
    with PretendDevice():
        made = BuddyForCausalLM.from_pretrained(tmp_path, device="cuda", **options)
        assert all(isinstance(tensor, OnDevice) for tensor in [*made.parameters(), *made.buffers()])
        weights = {name: tensor.cpu() for name, tensor in made.state_dict().items()}
        tokens = made.generate(random_ids(1, 4), **answer).tolist()
    assert tokens == expected.generate(random_ids(1, 4), **answer).tolist()
    torch.testing.assert_close(weights, dict(expected.state_dict()), atol=0, rtol=0)


def test_what_is_exported_is_what_the_cpu_exports(tmp_path):
    def export(model, folder):
        return export_model(model, folder, tokenizer=word_tokenizer(), source="tiny").folder

    here = contents(export(tiny_buddy(), tmp_path / "here"))
    with PretendDevice():
        there = contents(export(move(tiny_buddy()), tmp_path / "there"))
    assert there == here
