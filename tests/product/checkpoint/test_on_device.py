"""Saving, loading and exporting on a GPU, pretended or real: the files are the CPU's."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from buddy import BuddyForCausalLM
from buddy.errors import ModelError
from buddy.export.folder import export_model
from tests.gpu import is_real, is_there, move, on_gpu
from tests.methods.adainfer.test_policy import classifier
from tests.product.generation.test_ledger_budget import with_ledger
from tests.product.policies.made import gated, random_pudding
from tests.tiny import random_ids, random_router, tiny_buddy, tiny_model
from tests.words import word_tokenizer

pytestmark = pytest.mark.usefixtures("gpu")


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
    with on_gpu():
        move(model).save_pretrained(tmp_path / "there", tokenizer=word_tokenizer())
    assert len(contents(tmp_path / "here")) >= 2
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def several_gpus(monkeypatch, count):
    """A machine with so many GPUs."""
    if is_real():
        if torch.cuda.device_count() < count:
            pytest.skip(f"there are no {count} CUDA devices here")
        return
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)


@pytest.mark.parametrize("name", ["predictor", "ledger", "adapted", "d-llm"])
def test_a_checkpoint_is_loaded_to_the_device(name, tmp_path, monkeypatch):
    MODELS[name]().save_pretrained(tmp_path, tokenizer=word_tokenizer())
    options = {"engine": "general", "merge_adapter": name == "adapted"}
    expected = BuddyForCausalLM.from_pretrained(tmp_path, device="cpu", **options)
    several_gpus(monkeypatch, 1)
    answer = {"max_new_tokens": 3, "do_sample": False}
    if name != "d-llm":  # which takes no budget
        answer["budget"] = 0.7
    with on_gpu():
        made = BuddyForCausalLM.from_pretrained(tmp_path, device="cuda", **options)
        assert all(is_there(tensor) for tensor in [*made.parameters(), *made.buffers()])
        weights = {name: tensor.cpu() for name, tensor in made.state_dict().items()}
        tokens = made.generate(random_ids(1, 4), **answer).tolist()
    assert tokens == expected.generate(random_ids(1, 4), **answer).tolist()
    torch.testing.assert_close(weights, dict(expected.state_dict()), atol=0, rtol=0)


SPREADS = {
    "named": ({"device": "cuda:2, cuda:0"}, [2, 2, 0], 3),
    "auto": ({"device": "auto"}, [0, 1, 2], 3),
    "transformers' name": ({"device_map": "balanced"}, [0, 0, 1], 2),
}


@pytest.mark.parametrize("name", ["predictor", "adapted"])
@pytest.mark.parametrize("asked", SPREADS)
def test_blocks_are_loaded_to_the_devices_that_are_named(name, asked, tmp_path, monkeypatch):
    MODELS[name]().save_pretrained(tmp_path, tokenizer=word_tokenizer())
    options, few, count = SPREADS[asked]
    expected = BuddyForCausalLM.from_pretrained(tmp_path, device="cpu", engine="general")
    several_gpus(monkeypatch, count)
    answer = {"max_new_tokens": 3, "do_sample": False, "budget": 0.7}
    with on_gpu():
        made = BuddyForCausalLM.from_pretrained(tmp_path, engine="general", **options)
        blocks = [{p.device.index for p in block.parameters()} for block in made.backbone.blocks]
        around = (made.backbone.embedding, made.backbone.head, made.router)
        homes = {p.device.index for part in around for p in part.parameters()}
        hooked = [each for each in made.modules() if hasattr(each, "_hf_hook")]
        tokens = made.generate(random_ids(1, 4), **answer)
        place = tokens.device.index
    assert blocks[::2] == [{index} for index in few]
    assert (homes, place, hooked) == ({few[0]}, few[0], [])
    assert tokens.tolist() == expected.generate(random_ids(1, 4), **answer).tolist()


def test_what_cannot_be_spread_is_refused_by_name(tmp_path, monkeypatch):
    MODELS["predictor"]().save_pretrained(tmp_path, tokenizer=word_tokenizer())
    several_gpus(monkeypatch, 8)

    def load(**options):
        with on_gpu():
            BuddyForCausalLM.from_pretrained(tmp_path, **options)

    with pytest.raises(ModelError, match=r"cuda:\d would have none of the model's 6 blocks"):
        load(device="cuda:0,cuda:1,cuda:2,cuda:3,cuda:4,cuda:5,cuda:6")
    with pytest.raises(ModelError, match=r"takes one device, got cuda:0, cuda:1: .* with quant"):
        load(device="cuda:0,cuda:1", quant="int8")
    with pytest.raises(ModelError, match="'cuda' and device_map 'auto' are two names"):
        load(device="cuda", device_map="auto")
    if is_real():
        return
    monkeypatch.setattr("tests.pretend.MEMORY", 100_000)
    with pytest.raises(ModelError, match=r"0.0 GB of weights do not fit .* free on cuda: name"):
        load(device="cuda")


def test_what_is_exported_is_what_the_cpu_exports(tmp_path):
    def export(model, folder):
        return export_model(model, folder, tokenizer=word_tokenizer(), source="tiny").folder

    here = contents(export(tiny_buddy(), tmp_path / "here"))
    with on_gpu():
        there = contents(export(move(tiny_buddy()), tmp_path / "there"))
    assert there == here
