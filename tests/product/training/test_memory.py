"""The memory that is told before a step, beside what a step's autograd keeps."""

import copy
import dataclasses
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from buddy.checkpoint.resolve import resolve
from buddy.cli.main import app
from buddy.data.examples import Example, Source
from buddy.training import fast
from buddy.training.recipe import AdaptedModelSettings, DataSettings
from buddy.training.router.memory import plan_memory
from buddy.training.router.model import build_model
from buddy.training.router.recipe import (
    BudgetSettings,
    LoraSettings,
    OptimSettings,
    Recipe,
    RouterSettings,
)
from buddy.training.router.trainer import JointTrainer
from tests.tiny import CONFIGS, tiny_model
from tests.words import word_tokenizer

ROOT = Path(__file__).parents[3]
LENGTH = 48
"""Tokens of each row: without pads, rectangles are what a step computes."""


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A checkpoint of a deep tiny model, which a plan and a step both load."""

    def make(family):
        config = copy.deepcopy(CONFIGS[family])
        config.num_hidden_layers, config.hidden_size, config.intermediate_size = 12, 64, 160
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types * 2
        monkeypatch.setitem(CONFIGS, family, config)
        tiny_model(family).save_pretrained(tmp_path)
        word_tokenizer().save_pretrained(tmp_path)
        return tmp_path

    return make


def recipe_of(folder, **settings):
    blocks = settings.pop("blocks", "12 blocks")
    return Recipe(
        data=DataSettings(train=(Source(path="unused"),), max_tokens=LENGTH),
        model=AdaptedModelSettings(name=str(folder), dtype="float32"),
        budget=BudgetSettings(choices=(blocks,)),
        lora=LoraSettings(rank=2, dropout=0.0),
        router=RouterSettings(**settings.pop("router", {})),
        optim=OptimSettings(batch_size=4, steps=1, **settings),
    )


def kept_by_a_step(recipe, monkeypatch):
    """Bytes of what autograd keeps of a step, weights apart, and the trainer."""
    monkeypatch.setattr(fast, "fast_attention", lambda backbone: nullcontext())  # as on a GPU
    model = build_model(recipe, resolve(recipe.model.name), "cpu")
    examples = [
        Example(tuple(range(2 + row, 18 + row)), tuple(range(20, 4 + LENGTH)), "")
        for row in range(4)
    ]
    trainer = JointTrainer(model, recipe, examples)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer._backward(examples, seed=0, step=0)
    for weights in (*model.parameters(), *model.buffers()):
        kept.pop(weights.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), trainer


@pytest.mark.parametrize(
    ("family", "blocks", "checkpointing"),
    [("llama", 12, False), ("llama", 6, True), ("qwen3", 6, False), ("gemma3_text", 12, True)],
)
def test_activations_are_those_of_a_step(family, blocks, checkpointing, base, monkeypatch):
    recipe = recipe_of(
        base(family), blocks=f"{blocks} blocks", activation_checkpointing=checkpointing
    )
    plan = plan_memory(recipe)
    kept, _ = kept_by_a_step(recipe, monkeypatch)
    whole = plan.run * 4 * LENGTH + plan.fixed if checkpointing else 0
    told = plan.activations(4 * LENGTH, blocks, checkpointing=checkpointing) - whole
    assert told == pytest.approx(kept, rel=0.1)


def test_weights_and_adapters_are_those_of_a_trainer(base, monkeypatch):
    recipe = recipe_of(base("llama"), average=0.5)
    plan = plan_memory(recipe)
    _, trainer = kept_by_a_step(recipe, monkeypatch)
    trainer.optimizer.step()
    states = [
        value
        for state in trainer.optimizer.state.values()
        for value in state.values()
        if value.ndim > 0
    ]
    held = sum(map(torch.numel, [*trainer.parameters.values(), *states]))
    assert all(p.grad is not None for p in trainer.parameters.values())
    gradients = mean = sum(map(torch.numel, trainer.parameters.values()))
    assert plan.adapters == 4 * (held + gradients + mean)
    frozen = [p for p in trainer.model.model.parameters() if not p.requires_grad]
    frozen += trainer.model.model.buffers()
    assert plan.weights == sum(t.nbytes for t in frozen)
    inside = [p for p in trainer.model.backbone.blocks.parameters() if not p.requires_grad]
    blocks = sum(p.nbytes for p in inside)
    optim = dataclasses.replace(recipe.optim, fsdp=True)
    shared = plan_memory(dataclasses.replace(recipe, optim=optim), processes=4)
    gathered = 2 * blocks // plan.num_blocks
    assert shared.weights == pytest.approx(plan.weights - blocks * 3 / 4 + gathered, abs=1)


def test_the_page_has_what_is_told_of_a_model_of_llama_3_8bs_shape(tmp_path):
    shape = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    shape.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()  # of which nothing is read
    recipe = str(ROOT / "recipes" / "paper.toml")
    command = ["train", recipe, "--set", f"model.name={tmp_path}", "--plan-memory"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, (done.stderr, done.exception)
    _, *told = (" ".join(line.split()) for line in done.stdout.splitlines() if line.strip())
    page = (ROOT / "docs" / "how-to" / "train-memory.md").read_text()
    shown = page.partition("```text\n  weights ")[2].partition("```")[0]
    lines = [" ".join(line.split()) for line in f"weights {shown}".splitlines() if line.strip()]
    assert len(lines) == 9
    assert told[: len(lines)] == lines  # what `card` means comes last
