"""Where a model is loaded to: what is named is obeyed or refused, and a GPU is not passed over."""

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.cli.loading import load_to_measure
from buddy.errors import ModelError
from buddy.hub import device as devices
from buddy.hub.device import VARIABLE, pick_device, pick_devices
from buddy.training.run import Run


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a GPU whose driver is too old for a torch that was built for CUDA."""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.42.01")

    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_first_cuda_device_is_taken_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device(None) == torch.device("cuda")
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ModelError, match=r"device cuda:2 is not there: torch .* finds 2 CUDA"):
        pick_device("cuda:2")


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_several_devices_are_those_of_cuda_each_once(two_gpus, monkeypatch):
    both = (torch.device("cuda:1"), torch.device("cuda:0"))
    assert pick_devices("cuda:1,cuda") == both
    assert pick_devices("auto") == pick_devices("balanced") == both[::-1]
    assert pick_devices("cuda:1") == both[:1]
    monkeypatch.setenv(VARIABLE, "cuda:1, cuda:0")
    assert pick_devices(None) == both
    for named in ("cuda:0,cpu", "cuda,cuda:0"):
        with pytest.raises(ModelError, match=f"each named once, got '{named}': expected"):
            pick_devices(named)
    with pytest.raises(ModelError, match="device cuda:2 is not there"):
        pick_devices("cuda:0,cuda:2")
    with pytest.raises(ModelError, match="no model can be loaded to ''"):
        pick_devices("cuda:0,")


def test_all_devices_of_a_machine_without_a_gpu_are_its_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_devices("auto") == (torch.device("cpu"),)


def test_what_takes_one_device_refuses_several(two_gpus, monkeypatch, tmp_path):
    with pytest.raises(ModelError, match=r"takes one device, got cuda:0, cuda:1: .* name one"):
        pick_device("auto")
    monkeypatch.setenv(VARIABLE, "cuda:0,cuda:1")
    with pytest.raises(ModelError, match="takes one device"):
        Run(recipe=None, out=tmp_path)
    with pytest.raises(ModelError, match="takes one device"):
        load_to_measure("smollm2-135m", 8, None, dtype=None, check=None)


def test_a_machine_without_a_gpu_runs_on_its_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(None) == torch.device("cpu")


def test_a_gpu_that_torch_cannot_use_is_not_passed_over(gpu, monkeypatch):
    with pytest.raises(ModelError, match=r"driver on your system is too old .*: update its driver"):
        pick_device(None)
    with pytest.raises(ModelError, match=r"finds 0 CUDA devices \(The NVIDIA driver"):
        pick_device("cuda")
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert pick_device(None) == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:", "cpu:0x", "c\nuda"])
def test_what_is_no_device_is_refused(name):
    with pytest.raises(ModelError, match="expected cpu, cuda, cuda:1 or mps"):
        pick_device(name)


def test_a_device_is_refused_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("BUDDY_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="no model can be loaded to"):
        BuddyForCausalLM.from_pretrained("smollm2-135m", device="nowhere")
    assert not list(tmp_path.iterdir())
