"""FSDP2: what two processes share is what one loads alone, and neither ever holds it whole."""

import copy
import ctypes
import gc
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from buddy.data.examples import Source
from buddy.errors import RecipeError
from buddy.hub.mapped_load import MappedWeights
from buddy.hub.place import find_model
from buddy.processes import joined, launched
from buddy.training.recipe import AdaptedModelSettings, DataSettings
from buddy.training.router.model import build_model
from buddy.training.router.recipe import LoraSettings, OptimSettings, Recipe, RouterSettings
from buddy.training.router.sharding import shard
from buddy.training.router.start import start_router
from tests.product.cli.launched import call_two
from tests.product.hub import gguf_files
from tests.product.training.examples import random_examples
from tests.tiny import CONFIGS, tiny_model

EXAMPLES = random_examples(6)
M_MMAP_THRESHOLD = -3
CPU = torch.device("cpu")


def recipe(dtype="float32", start=None, prior="none"):
    return Recipe(
        data=DataSettings(train=(Source(path="unused"),), max_tokens=24),
        model=AdaptedModelSettings(dtype=dtype),
        router=RouterSettings(prior=prior),
        optim=OptimSettings(fsdp=True),
        lora=LoraSettings(rank=2, start=start),
    )


def whole(made, name):
    """The model of a process that shares nothing, as it starts."""
    model = build_model(made, name, "cpu")
    start_router(model, EXAMPLES, spread=0.1, seed=0)
    return model


def shared(made, name):
    """The model of which this process holds shares, its blocks, and what has mapped it."""
    mapped = MappedWeights()
    model = build_model(made, name, "cpu", mapped)
    blocks = shard(model, CPU, launched().size, getattr(torch, made.model.dtype), mapped)
    return model, blocks, mapped


def assert_same(made, name):
    alone, (model, blocks, mapped) = whole(made, name), shared(made, name)
    with blocks.gathered(range(1)):
        start_router(model, EXAMPLES, spread=0.1, seed=0)
    expected, found = (dict(each.named_parameters()) for each in (alone, model))
    assert found.keys() == expected.keys()
    held = 0
    for name, tensor in found.items():
        is_shared = isinstance(tensor, DTensor)
        assert is_shared == (".layers." in name and "lora_" not in name)
        own = tensor.to_local() if is_shared else tensor
        held += own.numel() if is_shared else 0
        assert not any(own.data_ptr() in stretch for stretch in mapped._stretches), name
        gathered = tensor.full_tensor() if is_shared else tensor
        assert gathered.dtype == expected[name].dtype, name
        assert torch.equal(gathered, expected[name]), name
        assert tensor.requires_grad == expected[name].requires_grad
    of_blocks = sum(p.numel() for n, p in expected.items() if isinstance(found[n], DTensor))
    assert 0.4 < held / of_blocks < 0.6
    assert model.facts() == alone.facts()
    assert any("lora_" in name for name in found)


def compare(folder):
    """In each process: every way in which weights are stored and wanted."""
    folder = Path(folder)
    os.environ["BUDDY_HOME"] = str(folder / "home")
    with joined():
        if launched().rank == 1:  # transformers has the first process alone write models
            find_model(folder / "tiny.gguf").folder()
        launched().exchange(None)
        for stored, dtype in (
            *(("float32", "bfloat16"), ("float16", "bfloat16")),
            *(("parts", "bfloat16"), ("mixed", "float32")),
        ):
            assert_same(recipe(dtype), folder / stored)
        assert_same(recipe("float32", start=str(folder / "adapted")), folder / "float32")
        assert_same(recipe("bfloat16", prior="default"), folder / "tiny.gguf")
        for stored in ("float32", "mixed"):
            with pytest.raises(RecipeError, match=r"weights of torch\.float16 are not those"):
                shared(recipe("float16"), folder / stored)


def test_what_is_shared_is_what_one_process_loads(tmp_path):
    for stored in ("float32", "float16"):
        tiny_model("llama3").to(getattr(torch, stored)).save_pretrained(tmp_path / stored)
    small = tiny_model("qwen3").bfloat16()
    small.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    small.model.layers[2].mlp.float()
    small.save_pretrained(tmp_path / "mixed")
    model = whole(recipe(), tmp_path / "float32")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_()
    model.save_pretrained(tmp_path / "adapted")
    gguf_files.write_gguf(tmp_path / "tiny.gguf", gguf_files.tiny_model(num_hidden_layers=6))
    call_two(f"{__name__}:compare", tmp_path, str(tmp_path))


def resident(name):
    """Bytes of this process: "VmRSS" for now, "VmHWM" for the most since `forget`."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def forget():
    Path("/proc/self/clear_refs").write_text("5")


def hold(folder, block_bytes, num_blocks):
    """In each process: the most that is resident while it takes its share."""
    os.environ["BUDDY_HOME"] = str(Path(folder) / "home")
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # what is freed is given back
    blocks, block = int(block_bytes) * int(num_blocks), int(block_bytes)
    with joined():
        shared(recipe(), Path(folder) / "small")  # modules are imported on the way
        for dtype, share in (("float32", blocks / 2), ("bfloat16", blocks / 4)):
            model = None  # that of the last time
            gc.collect()
            before = resident("VmRSS")
            forget()
            model, *_ = shared(recipe(dtype), Path(folder) / "large")
            most = resident("VmHWM") - before
            stays = resident("VmRSS") - before
            assert model.dtype == getattr(torch, dtype)
            # A block of the file, one of another number format, and whatever else is loaded.
            assert 0.9 * share < stays <= most < share + 5 * block, (stays / block, most / block)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's account of memory is Linux's")
def test_a_process_holds_its_shares_and_a_block_at_a_time(tmp_path):
    tiny_model().save_pretrained(tmp_path / "small")
    config = copy.deepcopy(CONFIGS["llama"])
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 256, 2048, 32
    config.layer_types = None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "large")
    block_bytes = sum(p.nbytes for p in model.model.layers[0].parameters())
    del model
    sizes = (str(block_bytes), str(config.num_hidden_layers))
    call_two(f"{__name__}:hold", tmp_path, str(tmp_path), *sizes)
