"""`--device` is obeyed by every command that computes, or refused before anything is loaded."""

import os

import pytest
import torch
from accelerate import Accelerator
from typer.testing import CliRunner

from buddy.cli.registry import make_app
from buddy.hub import device as devices
from buddy.hub.device import VARIABLE, pick_devices
from buddy.training.router import run as adapters
from tests.tiny import tiny_model

COMPUTES = (
    *("generate", "chat", "serve", "importance", "search", "bench", "reproduce", "route"),
    *("train", "train-budget", "train-ledger", "observe ranks", "observe context"),
    *(f"eval {part}" for part in ("tasks", "ppl", "answers", "gsm8k", "mmlu", "rouge")),
)


@pytest.mark.parametrize("command", COMPUTES)
def test_every_command_that_computes_takes_a_device(command):
    shown = CliRunner().invoke(make_app(), [*command.split(), "--help"])
    assert "--device DEVICE" in shown.output


def test_a_device_that_is_not_there_is_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(make_app(), ["generate", "Hi", "-m", "none", "--device", "cuda:7"])
    assert "device cuda:7 is not there" in str(result.exception)


def test_the_model_is_loaded_to_the_device_that_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv(VARIABLE, "cuda:1")
    asked = []

    def place(device):
        asked.append((device, [str(each) for each in pick_devices(device)]))
        raise devices.ModelError("enough")

    monkeypatch.setattr("buddy.hub.loading.pick_devices", place)
    tiny_model().save_pretrained(tmp_path)
    options = ["generate", "Hi", "--raw", "-m", str(tmp_path)]
    CliRunner().invoke(make_app(), [*options, "--device", "cpu"])
    CliRunner().invoke(make_app(), [*options, "--device", "cuda:1,cuda:0"])
    CliRunner().invoke(make_app(), [*options, "--device", "auto"])
    CliRunner().invoke(make_app(), options)
    assert asked == [
        (None, ["cpu"]),
        (None, ["cuda:1", "cuda:0"]),
        (None, ["cuda:0", "cuda:1"]),
        (None, ["cuda:1"]),
    ]
    assert os.environ[VARIABLE] == "cuda:1"


def test_processes_of_accelerate_do_not_share_a_device(monkeypatch):
    accelerator = Accelerator()
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    assert adapters._device(accelerator) == accelerator.device
    monkeypatch.setenv(VARIABLE, "cpu")
    with pytest.raises(adapters.TrainingError, match="2 processes cannot share the device cpu"):
        adapters._device(accelerator)
