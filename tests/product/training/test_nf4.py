"""A frozen base of 4 bits: what it computes, what learns on it, and what comes out."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers.models.llama import LlamaConfig

from buddy import BuddyForCausalLM
from buddy.backbone.nf4 import GROUP, NF4Linear, check_nf4, freeze_in_nf4
from buddy.checkpoint.resolve import resolve
from buddy.data.examples import Source
from buddy.errors import CheckpointError, ModelError, RecipeError, TrainingError
from buddy.settings import build, read_recipe
from buddy.training.recipe import AdaptedModelSettings, DataSettings
from buddy.training.route.recipe import RouteRecipe
from buddy.training.router.evaluate import evaluate
from buddy.training.router.lora import add_lora
from buddy.training.router.memory import plan_memory
from buddy.training.router.model import check_recipe
from buddy.training.router.recipe import (
    BudgetSettings,
    LogSettings,
    LoraSettings,
    OptimSettings,
    Recipe,
    RouterSettings,
)
from buddy.training.router.run import train
from buddy.training.router.trainer import JointTrainer
from tests.product.training.examples import random_examples
from tests.product.training.made import write_rows
from tests.tiny import NUM_BLOCKS, random_ids, random_router, tiny_buddy, tiny_model
from tests.words import word_tokenizer

EXAMPLES = random_examples(8)
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
QUANTILES = (
    *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
    *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0),
)
"""Of a normal distribution: QLoRA, appendix E."""


def has_bitsandbytes():
    try:
        import bitsandbytes  # noqa: F401  # its presence is asked for
    except ImportError:
        return False
    return True


needs_bitsandbytes = pytest.mark.skipif(
    not has_bitsandbytes(), reason='needs bitsandbytes: pip install ".[qlora]"'
)


def frozen(name="llama", dtype=torch.float32):
    model = tiny_model(name).to(dtype)
    freeze_in_nf4(BuddyForCausalLM(model).backbone, CPU)
    return model


def widened(model):
    """The slow reference: the same numbers in plain layers."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, NF4Linear):
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
            plain.weight = torch.nn.Parameter(layer.widened(torch.float32))
            plain.bias = layer.bias
            model.set_submodule(name, plain)
    assert not any(isinstance(layer, NF4Linear) for layer in model.modules())
    return model


def trainer(model, *, rank=2, dropout=0.0, checkpointing=False, keep_context=False):
    """Of all kinds of gradients: gates, depths by token, a second route."""
    recipe = Recipe(
        data=DataSettings(train=(Source(path="unused"),), max_tokens=24),
        router=RouterSettings(relaxation="gumbel", second_route=0.5),
        budget=BudgetSettings(full_prompts=0.7, mixed_answers=0.5, stretch=2),
        lora=LoraSettings(rank=rank, dropout=dropout),
        optim=OptimSettings(
            batch_size=4, steps=3, learning_rate=1e-2, activation_checkpointing=checkpointing
        ),
    )
    router = random_router(model, scale=0.5)
    without = ["model.layers.0.self_attn.k_proj"] if keep_context else ()
    adapted = add_lora(model, recipe.lora, 0, without)
    made = JointTrainer(BuddyForCausalLM(adapted, router=router).train(), recipe, EXAMPLES)
    with torch.no_grad():
        for parameter in made.parameters.values():
            parameter.add_(0.05)  # B starts at zero, and A would have no slope
    return made


def gradients(made):
    torch.manual_seed(3)
    rows = made._backward(EXAMPLES[:4], seed=5, step=0)
    return rows, {name: parameter.grad for name, parameter in made.parameters.items()}


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128), (48, 32), (16, 96)], ids=str)
def test_weights_are_the_nearest_quantiles_of_their_group(shape, dtype):
    torch.manual_seed(0)
    linear = torch.nn.Linear(*shape, dtype=dtype)
    made = NF4Linear(linear, CPU).widened(torch.float32)
    assert made.shape == linear.weight.shape
    groups, made = linear.weight.detach().float().view(-1, GROUP), made.view(-1, GROUP)
    largest, quantiles = groups.abs().amax(1, keepdim=True), torch.tensor(QUANTILES)
    nearest = quantiles[((groups / largest)[..., None] - quantiles).abs().argmin(-1)]
    # Scales have 8 bits of their own: so much they, and all that they scale, may be off.
    off = (largest - largest.mean()).abs().max() / 50 + largest.max() / 200
    assert_close(made, nearest * largest, atol=float(off), rtol=0)


@needs_bitsandbytes
def test_the_linear_layers_of_the_blocks_are_frozen_and_no_others():
    model = frozen()
    names = {name for name, layer in model.named_modules() if isinstance(layer, NF4Linear)}
    assert len(names) == NUM_BLOCKS * 7
    assert all(name.startswith("model.layers.") for name in names)
    assert type(model.lm_head) is torch.nn.Linear


@needs_bitsandbytes
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"checkpointing": True},
        {"rank": 0},
        {"dropout": 0.3},
        {"keep_context": True},
    ],
    ids=str,
)
def test_a_step_is_that_of_the_widened_weights(settings):
    made, expected = trainer(frozen(), **settings), trainer(widened(frozen()), **settings)
    evaluate(made.model, EXAMPLES[:2], [4])  # what is evaluated between steps goes on to learn
    (rows, slopes), (wanted_rows, wanted) = gradients(made), gradients(expected)
    assert_close([row[0] for row in rows], [row[0] for row in wanted_rows], atol=1e-5, rtol=1e-5)
    assert [row[1:3] for row in rows] == [row[1:3] for row in wanted_rows]
    assert slopes.keys() == wanted.keys()
    for name, slope in slopes.items():
        assert wanted[name].abs().max() > 0, name
        assert_close(slope, wanted[name], atol=1e-5, rtol=1e-3, msg=name)


@needs_bitsandbytes
def test_adapters_and_router_learn_and_nothing_else():
    made = trainer(frozen())
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    for step in range(2):
        made.step(step)
    assert all("lora_" in name or name.startswith("router.") for name in made.parameters)
    learned = {
        name for name, p in made.model.named_parameters() if not torch.equal(p, before[name])
    }
    assert {name.removeprefix("model.") for name in learned} == {
        name.removeprefix("model.") for name in made.parameters
    }


@needs_bitsandbytes
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text"])
def test_losses_are_near_to_those_of_the_plain_base(family):
    """Within 0.15 nats, on random weights, where 4 bits lose more than on trained ones."""
    losses = [
        evaluate(BuddyForCausalLM(model, policy="full"), EXAMPLES, [NUM_BLOCKS])[0][0].cross_entropy
        for model in (frozen(family), tiny_model(family))
    ]
    assert 0 < abs(losses[0] - losses[1]) < 0.15


@pytest.fixture
def folder(tmp_path):
    model = tiny_model("qwen3").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    word_tokenizer().save_pretrained(tmp_path / "base")
    write_rows(tmp_path / "rows.jsonl", 8)
    return tmp_path


def recipe_of(folder, **model):
    return Recipe(
        model=AdaptedModelSettings(name=str(folder / "base"), quant="nf4", **model),
        data=DataSettings(train=(Source(path=str(folder / "rows.jsonl")),), max_tokens=40),
        lora=LoraSettings(rank=2),
        router=RouterSettings(prior="none", rank=4),
        optim=OptimSettings(steps=2, batch_size=4, learning_rate=1e-2, warmup_steps=0),
        log=LogSettings(tensorboard=False, save_every=1),
    )


@needs_bitsandbytes
def test_what_comes_out_loads_on_the_plain_base(folder):
    checkpoint = train(recipe_of(folder), folder / "out")
    model = BuddyForCausalLM.from_pretrained(checkpoint)
    assert model.backbone.dtype == torch.bfloat16
    assert not any(isinstance(layer, NF4Linear) for layer in model.modules())
    base = BuddyForCausalLM.from_pretrained(folder / "base", policy="full")
    assert model.base_fingerprint == base.base_fingerprint
    ids = random_ids(1, 7)
    apart = (model(ids).logits - base(ids).logits).abs().max()
    assert apart > 0
    merged = BuddyForCausalLM.from_pretrained(checkpoint, merge_adapter=True)
    assert_close(merged(ids).logits, model(ids).logits, atol=0.2, rtol=0.05)  # of bfloat16


@needs_bitsandbytes
def test_a_run_goes_on_on_the_same_base_alone(folder):
    train(recipe_of(folder), folder / "out")
    recipe = recipe_of(folder)
    plain = replace(recipe, model=replace(recipe.model, quant=None))
    with pytest.raises(TrainingError, match=r"other model\.quant"):
        train(plain, folder / "out", resume=True)
    train(recipe, folder / "out", resume=True)


@needs_bitsandbytes
def test_its_weights_are_not_written(folder):
    model = BuddyForCausalLM.from_pretrained(folder / "base", quant="nf4", policy="full")
    assert model.num_parameters() == BuddyForCausalLM(tiny_model("qwen3")).num_parameters()
    with pytest.raises(CheckpointError, match="fewer bits"):
        model.save_pretrained(folder / "whole", include_backbone=True)
    model.save_pretrained(folder / "named")
    assert not (folder / "named" / "backbone").exists()
    plain = BuddyForCausalLM.from_pretrained(folder / "base", policy="full")
    plain.save_pretrained(folder / "own", include_backbone=True, tokenizer=word_tokenizer())
    own = BuddyForCausalLM.from_pretrained(folder / "own", quant="nf4")
    with pytest.raises(CheckpointError, match="fewer bits"):  # no place has them but this folder
        own.save_pretrained(folder / "copied")
    again = BuddyForCausalLM.from_pretrained(folder / "named")
    assert again.base_fingerprint == model.base_fingerprint


@needs_bitsandbytes
def test_an_adapter_must_be_merged_first(folder):
    tiny = tiny_buddy("qwen3")
    adapted = add_lora(tiny.model, LoraSettings(rank=2), 0)
    with pytest.raises(ModelError, match="merge_adapter=True"):
        freeze_in_nf4(BuddyForCausalLM(adapted).backbone, CPU)


def test_without_bitsandbytes_one_line_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    recipe = recipe_of(folder)
    with pytest.raises(ModelError, match=r"nf4.*bitsandbytes.*pip install.*qlora") as refused:
        train(recipe, folder / "out")
    assert "\n" not in str(refused.value)
    assert not (folder / "out").exists()


@needs_bitsandbytes
def test_a_mixture_of_experts_is_refused(folder):
    with pytest.raises(ModelError, match="experts"):
        check_nf4(BuddyForCausalLM(tiny_model("mixtral")).backbone)
    tiny_model("mixtral").save_pretrained(folder / "base")
    with pytest.raises(ModelError, match="experts"):
        check_recipe(recipe_of(folder), resolve(folder / "base"))


def test_stages_that_put_no_adapters_on_have_no_such_setting():
    values = {"model": {"name": "x", "quant": "nf4"}, "data": {"train": [{"path": "x"}]}}
    with pytest.raises(RecipeError, match="unknown key quant: expected name, dtype"):
        build(RouteRecipe, values, "recipe")


@needs_bitsandbytes
def test_memory_is_planned_for_what_is_held(folder):
    recipe = recipe_of(folder, dtype="float32")
    plan = plan_memory(recipe)
    model = BuddyForCausalLM.from_pretrained(
        folder / "base", dtype=torch.float32, quant="nf4"
    ).model
    layers = [layer for layer in model.modules() if isinstance(layer, NF4Linear)]
    scales = [t for m in layers for t in (m.state.absmax, m.state.state2.absmax)]
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *scales))
    assert plan.weights == held
    assert plan.widened == max(layer.widened(torch.float32).nbytes for layer in layers)


SHAPES = {
    "Llama-2-13B": {
        "vocab_size": 32_000,
        "hidden_size": 5120,
        "intermediate_size": 13_824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
    "Llama-3-70B": {
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_docs_tell_what_is_planned(shape, tmp_path):
    config = LlamaConfig(**SHAPES[shape], architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    save_file({"unread": torch.zeros(1)}, tmp_path / "model.safetensors")
    changes = (f"model.name={str(tmp_path)!r}", "model.quant=nf4", "router.prior=none")
    plan = plan_memory(read_recipe(Recipe, ROOT / "recipes" / "paper.toml", changes))
    hidden, blocks = config.hidden_size, config.num_hidden_layers
    kv_width = hidden * config.num_key_value_heads // config.num_attention_heads
    linear = 2 * hidden * (hidden + kv_width) + 3 * hidden * config.intermediate_size
    in_bfloat16 = 2 * (2 * hidden * config.vocab_size + blocks * (linear + 2 * hidden) + hidden)
    in_nf4 = in_bfloat16 - blocks * linear * (2 - 1 / 2 - 1 / 64 - 4 / 64 / 256)
    assert plan.weights == pytest.approx(in_nf4, rel=1e-4)
    told = (
        in_bfloat16,
        plan.weights,
        plan.peak(512, blocks),
        plan.peak(4096, blocks, checkpointing=True),
    )
    row = f"| {shape} | " + " | ".join(f"{num_bytes / 1e9:.1f}" for num_bytes in told) + " |"
    assert row in (ROOT / "docs" / "how-to" / "train-memory.md").read_text().splitlines()
