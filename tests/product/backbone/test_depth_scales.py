"""Adapters that know the depth, against plain adapters of each depth and the naive reference."""

import copy
import json
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.backbone.depth_scales import scaled_layers
from buddy.engine.executors.native.decoder import NativeDecoder
from buddy.engine.stretch import Stretch, run_stretch
from buddy.errors import CheckpointError, ModelError, PolicyError, RecipeError
from buddy.export.folder import check_exportable
from buddy.inference import InferenceModel
from buddy.training.adapters import fast_adapters
from buddy.training.router.depths import new_scales
from buddy.training.router.lora import add_lora
from buddy.training.router.recipe import LoraSettings
from buddy.training.router.trainer import trained_parameters
from tests.product.engine.decoding import decode
from tests.product.engine.schedules import Schedule, last_of
from tests.tiny import KV_POLICIES, NUM_BLOCKS, padded, random_ids, random_router, tiny_model

DEPTHS = (3, 4, 6)
LORA = LoraSettings(rank=3, alpha=6.0, depths=tuple(f"{depth} blocks" for depth in DEPTHS))
SCALING = 2.0
TOLERANCE = {"atol": 5e-5, "rtol": 1e-4}
"""Other orders of sums."""
has_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")


def fill(adapted, scales=None, seed=1):
    """Weights as large as if they had been trained."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 6)
        if scales is not None:
            scales.weight.copy_(torch.randn(scales.weight.shape, generator=draw))


def made(family="llama", *, base=None, **options):
    model = tiny_model(family) if base is None else base.model
    router = random_router(model)
    adapted = add_lora(model, LORA, 0)
    scales = new_scales(adapted, LORA, NUM_BLOCKS)
    fill(adapted, scales)
    origin = None if base is None else base.origin
    return BuddyForCausalLM(adapted, router=router, depth_scales=scales, origin=origin, **options)


def scale_at(scales, layer, blocks):
    """By hand: a line between the numbers of the depths around it, and 1 more."""
    numbers = scales.weight[layer].detach().numpy()
    by_rank = [np.interp(blocks, DEPTHS, numbers[:, rank]) for rank in range(numbers.shape[1])]
    return 1 + torch.tensor(by_rank, dtype=torch.float32)


def plain_at(buddy, family, blocks):
    """A model whose weights have the adapters of one depth added, and no other."""
    model, names = tiny_model(family), list(scaled_layers(buddy.backbone))
    layers = dict(buddy.backbone.blocks.named_modules())
    with torch.no_grad():
        for name, plain in BuddyForCausalLM(model).backbone.blocks.named_modules():
            layer = layers[name]
            if not hasattr(layer, "lora_A"):
                continue
            scale = torch.ones(LORA.rank)
            if name in names:
                scale = scale_at(buddy.depth_scales, names.index(name), blocks)
            down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            plain.weight.add_(SCALING * up @ torch.diag(scale) @ down)
    return BuddyForCausalLM(model, router=buddy.router)


def test_all_have_scales_but_the_first_block_and_keys_and_values():
    names = list(scaled_layers(made().backbone))
    kinds = (
        "self_attn.q_proj",
        "self_attn.o_proj",
        *(f"mlp.{n}_proj" for n in ("gate", "up", "down")),
    )
    assert names == [f"{block}.{kind}" for block in range(1, NUM_BLOCKS) for kind in kinds]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3"])
@pytest.mark.parametrize("blocks", [3, 5, 6])
@torch.no_grad()
def test_at_one_depth_it_is_the_model_whose_adapters_are_those_of_that_depth(family, blocks):
    buddy = made(family)
    ids, more = random_ids(2, 7), random_ids(2, 3, seed=1)
    reference = plain_at(buddy, family, blocks)
    budget = {"budget": f"{blocks} blocks"}
    found, plans, _ = decode(buddy, ids, torch.ones_like(ids), more, **budget)
    expected, expected_plans, _ = decode(reference, ids, torch.ones_like(ids), more, **budget)
    assert torch.equal(plans, expected_plans)
    assert_close(found, expected, **TOLERANCE)
    other, _, _ = decode(plain_at(buddy, family, 4), ids, torch.ones_like(ids), more, **budget)
    assert (other - found).abs().max() > 0.1


@pytest.mark.parametrize("kv_policy", KV_POLICIES)
@torch.no_grad()
def test_tokens_of_any_depths_equal_the_naive_reference(kv_policy):
    schedule = Schedule(made("qwen2", engine="general"), kv_policy, seed=3)
    for _ in range(6):
        step = schedule.step()
        for number, hidden in last_of(*step).items():
            expected = schedule.expected(schedule.fed[number])[-len(hidden) :]
            assert_close(hidden, expected, **TOLERANCE)


def test_before_training_they_are_plain_adapters_bit_for_bit():
    adapted = add_lora(tiny_model(), LORA, 0)
    fill(adapted)
    plain = BuddyForCausalLM(copy.deepcopy(adapted))
    scales = new_scales(adapted, LORA, NUM_BLOCKS)
    knowing = BuddyForCausalLM(adapted, depth_scales=scales)
    ids = random_ids(2, 7)
    with torch.no_grad():
        found, expected = (one(ids, use_cache=False).logits for one in (knowing, plain))
    assert torch.equal(found, expected)
    assert new_scales(adapted, LoraSettings(rank=3), NUM_BLOCKS) is None


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_scales_learn_by_the_gradient_of_plain_autograd(dropout):
    """With dropout the layers are PEFT's own, whose forward pass autograd takes apart."""
    buddy, ids = made("qwen2"), random_ids(3, 9)
    for layer in scaled_layers(buddy.backbone).values():
        layer.lora_dropout["default"] = (
            torch.nn.Dropout(dropout) if dropout else torch.nn.Identity()
        )
    buddy.eval()
    found = []
    for context in (fast_adapters(buddy.backbone), nullcontext()):
        with context:
            out = buddy(ids, budget=["3 blocks", "5 blocks", "6 blocks"], use_cache=False)
            out.logits.square().mean().backward()
        trained = {**trained_parameters(buddy)[0]}
        found.append({n: p.grad.clone() for n, p in trained.items() if p.grad is not None})
        for parameter in trained.values():
            parameter.grad = None
    fast, slow = found
    assert fast.keys() == slow.keys()
    assert fast["depth_scales.weight"].abs().amax((0, 2)).min() > 1e-4  # all depths get some
    for name, gradient in fast.items():
        assert_close(gradient, slow[name], atol=1e-5, rtol=1e-3, msg=name)


@pytest.fixture
def saved(tmp_path):
    tiny_model("qwen2.5").save_pretrained(tmp_path / "base")
    buddy = made(base=BuddyForCausalLM.from_pretrained(tmp_path / "base"))
    buddy.save_pretrained(tmp_path / "knowing")
    return tmp_path, buddy


@torch.no_grad()
def test_a_checkpoint_keeps_them_and_merges_into_what_they_compute(saved):
    folder, buddy = saved
    ids, mask = padded([random_ids(1, n, seed=n)[0] for n in (3, 8, 6)], "left")
    more, budgets = random_ids(3, 4, seed=1), {"budget": ["3 blocks", "5 blocks", 1.0]}
    expected, plans, _ = decode(buddy, ids, mask, more, **budgets)
    for load in (
        BuddyForCausalLM.from_pretrained(folder / "knowing"),
        BuddyForCausalLM.from_pretrained(folder / "knowing", merge_adapter=True, engine="general"),
        InferenceModel.load(folder / "knowing", engine="general"),
    ):
        assert load.facts()["depth_scales"] == buddy.facts()["depth_scales"]
        found, own_plans, _ = decode(load, ids, mask, more, **budgets)
        assert torch.equal(own_plans, plans)
        assert_close(found, expected, **TOLERANCE)
    BuddyForCausalLM.from_pretrained(folder / "knowing").save_pretrained(folder / "again")
    for name in ("routing.safetensors", "adapter/adapter_model.safetensors", "buddy.json"):
        assert (folder / "again" / name).read_bytes() == (folder / "knowing" / name).read_bytes()


def test_a_checkpoint_without_them_says_nothing_of_them(tmp_path):
    BuddyForCausalLM(tiny_model()).save_pretrained(tmp_path / "plain")
    assert "depth" not in (tmp_path / "plain" / "buddy.json").read_text()


@torch.no_grad()
def test_what_they_cost_is_counted(saved):
    folder, _ = saved
    knowing, plain = (
        BuddyForCausalLM.from_pretrained(folder / name, merge_adapter=True).backbone
        for name in ("knowing", "base")
    )
    # Rank 3 beside hidden size 32 and inner size 48: queries, output, gate, up, down; five blocks.
    own = 3 * (2 * (32 + 32) + 3 * (32 + 48)) * (NUM_BLOCKS - 1)
    counts = [sum(p.numel() for p in one.blocks.parameters()) for one in (knowing, plain)]
    assert counts[0] - counts[1] == own
    assert knowing.shape().block_params == counts[0] // NUM_BLOCKS


def test_what_knows_no_depth_is_refused_by_name(saved):
    folder, buddy = saved
    merged = BuddyForCausalLM.from_pretrained(folder / "knowing", merge_adapter=True)
    with pytest.raises(ModelError, match="this pass does not say it"):
        buddy.model(random_ids(1, 3))
    with pytest.raises(CheckpointError, match="cannot be saved"):
        merged.save_pretrained(folder / "merged")
    with pytest.raises(CheckpointError, match="cannot be exported"):
        check_exportable(merged)
    deep = random_router(tiny_model("qwen2.5"), context_layer=2)
    with pytest.raises(PolicyError, match=r"does not say after the first block"):
        BuddyForCausalLM(buddy.model, router=deep, depth_scales=buddy.depth_scales)
    with pytest.raises(ModelError, match="this model's adapters are others"):
        new_scales(add_lora(tiny_model(), LoraSettings(rank=2), 0), LORA, NUM_BLOCKS)
    for depths, words in ((("4 blocks",), "two budgets or more"), (("0.9", "0.5"), "rising")):
        with pytest.raises(RecipeError, match=words):
            new_scales(buddy.model, LoraSettings(rank=3, depths=depths), NUM_BLOCKS)
    with pytest.raises(RecipeError, match="depths are of adapters, and rank is 0"):
        LoraSettings(rank=0, depths=("0.5", "1.0"))


def native_twins(folder, **options):
    """The merged model twice: compiled code, and the general path."""
    return (
        BuddyForCausalLM.from_pretrained(
            folder / "knowing", merge_adapter=True, engine=engine, **options
        )
        for engine in ("native", "general")
    )


@has_compiler
@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("tokens", [6, 40])
@torch.no_grad()
def test_compiled_code_computes_them_for_few_tokens_and_many(saved, quant, tokens):
    """Forty tokens a row are more than a thread makes vectors of alone."""
    folder, _ = saved
    native, general = native_twins(folder, quant=quant)
    assert native.executor.name == "native"
    ids, more = random_ids(3, tokens), random_ids(3, 4, seed=1)
    budgets = {"budget": ["3 blocks", "5 blocks", 1.0]}
    found, plans, _ = decode(native, ids, torch.ones_like(ids), more, **budgets)
    expected, own_plans, _ = decode(general, ids, torch.ones_like(ids), more, **budgets)
    assert torch.equal(plans, own_plans)
    assert_close(found, expected, **TOLERANCE)


@has_compiler
@pytest.mark.parametrize("kv_policy", KV_POLICIES)
@torch.no_grad()
def test_compiled_code_runs_tokens_of_any_depths_as_the_naive_reference_does(saved, kv_policy):
    folder, _ = saved
    (native, _) = native_twins(folder)
    fast = NativeDecoder(native.backbone, threads=2)
    schedule = Schedule(native, kv_policy, seed=4, executors=(None, fast))
    for _ in range(8):
        for number, hidden in last_of(*schedule.step()).items():
            expected = schedule.expected(schedule.fed[number])[-len(hidden) :]
            assert_close(hidden, expected, **TOLERANCE)


@has_compiler
@torch.no_grad()
def test_compiled_code_in_bfloat16_is_near_the_general_path(saved):
    folder, _ = saved
    native, general = native_twins(folder, dtype=torch.bfloat16)
    ids, more = random_ids(2, 6), random_ids(2, 4, seed=1)
    budgets = {"budget": ["4 blocks", 1.0]}
    found, _, _ = decode(native, ids, torch.ones_like(ids), more, **budgets)
    expected, _, _ = decode(general, ids, torch.ones_like(ids), more, **budgets)
    exact, _, _ = decode(next(native_twins(folder)), ids, torch.ones_like(ids), more, **budgets)
    off, theirs = ((one.float() - exact).norm() / exact.norm() for one in (found, expected))
    assert off < 0.02 + theirs


@has_compiler
def test_a_stretch_without_a_plan_is_refused_by_compiled_code_too(saved):
    folder, _ = saved
    native, general = native_twins(folder)
    for buddy in (native, general):
        session = buddy.new_session(1, 8)
        session.join()
        (sequence,) = session.sequences.values()
        stretch = Stretch(sequence=sequence, token_ids=random_ids(1, 2)[0], blocks=range(3))
        with torch.no_grad(), pytest.raises(ModelError, match="this pass does not say it"):
            run_stretch(buddy.backbone, session, stretch, buddy.executor.fast_path())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"depths": [3, 4, 7]}, "the largest of its depths is 7 blocks, and the base model has 6"),
        ({"depths": [4, 3, 6]}, "at least two numbers of blocks, rising"),
        ({"layers": 24}, "does not fit its description"),
        ({"rank": 4}, "does not fit its description"),
    ],
)
@pytest.mark.parametrize("merge", [False, True])
def test_a_checkpoint_whose_scales_are_others_is_refused(saved, changes, words, merge):
    folder, _ = saved
    path = folder / "knowing" / "buddy.json"
    manifest = json.loads(path.read_text())
    manifest["depth_scales"] |= changes
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=words):
        BuddyForCausalLM.from_pretrained(folder / "knowing", merge_adapter=merge)
