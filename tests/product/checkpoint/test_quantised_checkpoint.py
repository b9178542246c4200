"""Weights that are saved in fewer bits: they load as they lie, or are refused by name."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.backbone.quantised import QuantisedEmbedding, QuantisedLinear
from buddy.checkpoint import load
from buddy.errors import CheckpointError, ModelError
from tests.product.checkpoint.test_checkpoint import IDS, adapted, logits, routed  # noqa: F401
from tests.product.cli import forked
from tests.tiny import tiny_model
from tests.words import word_tokenizer

FORMATS = pytest.mark.parametrize("quant", ["int8", "int4"])


def quantised(folder, quant="int4", family="qwen2.5", dtype=None):
    """A base model's folder, and a checkpoint of it in fewer bits."""
    tiny_model(family).save_pretrained(folder / "base")
    word_tokenizer().save_pretrained(folder / "base")
    options = {"quant": quant, "dtype": dtype, "policy": "static:2,4,1,3"}
    model = BuddyForCausalLM.from_pretrained(folder / "base", **options).eval()
    tokenizer = load_tokenizer(folder / "base")
    model.save_pretrained(folder / "model", include_backbone=True, tokenizer=tokenizer)
    return model, folder / "model"


@FORMATS
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", None),
        ("qwen2.5", torch.bfloat16),  # its head is its embedding
        ("gemma3_text", None),  # so it is here, and rows are scaled
        ("mixtral", torch.bfloat16),  # experts stay as they are
    ],
)
def test_what_loads_is_what_was_saved(tmp_path, quant, family, dtype):
    model, folder = quantised(tmp_path, quant, family, dtype)
    loaded = BuddyForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(loaded)[0], logits(model)[0])
    assert loaded.backbone.dtype == model.backbone.dtype
    assert loaded.origin.quant == quant
    kinds = [type(model.backbone.embedding), type(loaded.backbone.embedding)]
    assert kinds[0] is kinds[1]
    named = dict(model.model.state_dict())
    found = loaded.model.state_dict()
    assert found.keys() == named.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in named.items())
    BuddyForCausalLM.from_pretrained(folder, quant=quant).save_pretrained(
        tmp_path / "again", include_backbone=True
    )
    again = BuddyForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again)[0], logits(model)[0])


@FORMATS
def test_the_router_and_a_merged_adapter_go_with_it(adapted, tmp_path, quant):  # noqa: F811
    adapted.save_pretrained(tmp_path / "adapted", include_backbone=True)
    options = {"merge_adapter": True, "quant": quant}
    model = BuddyForCausalLM.from_pretrained(tmp_path / "adapted", **options)
    model.save_pretrained(tmp_path / "model", include_backbone=True)
    loaded = BuddyForCausalLM.from_pretrained(tmp_path / "model", merge_adapter=True)
    before, after = logits(model), logits(loaded)
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert loaded.policy.name == "routed"


def test_nothing_is_converted_and_no_plain_weight_is_made(tmp_path, monkeypatch):
    _, folder = quantised(tmp_path)
    monkeypatch.setattr(load, "quantise_backbone", lambda *_: 1 / 0)
    model = BuddyForCausalLM.from_pretrained(folder)
    layers = [layer for layer in model.model.modules() if isinstance(layer, QuantisedLinear)]
    assert len(layers) > 7 * 6
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in (*model.model.parameters(), *model.model.buffers())}  # fmt: skip
    with safe_open(folder / "backbone" / "quantised.safetensors", framework="pt") as file:
        saved = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert sum(held.values()) < 1.3 * saved  # each begins at a cache line
    assert isinstance(model.backbone.embedding, QuantisedEmbedding)


def test_another_quantisation_or_number_format_is_refused_by_name(tmp_path):
    _, folder = quantised(tmp_path)
    with pytest.raises(CheckpointError, match="saved in int4, got quant 'int8': leave it out"):
        BuddyForCausalLM.from_pretrained(folder, quant="int8")
    with pytest.raises(ModelError, match=r"beside numbers of torch.float32, got dtype"):
        BuddyForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    outline = BuddyForCausalLM.outline(folder)
    assert outline.num_blocks == 6
    assert outline.origin.quant == "int4"


def test_no_other_program_takes_the_bytes_for_weights(tmp_path):
    _, folder = quantised(tmp_path, "int8")
    with pytest.raises(OSError, match="no file named model"):
        AutoModelForCausalLM.from_pretrained(folder / "backbone")
    with pytest.raises(CheckpointError, match="no plain numbers"):
        BuddyForCausalLM.from_pretrained(folder / "backbone")


def damaged(folder, change):
    """The checkpoint with other tensors, listed as if they had been written so."""
    weights = folder / "backbone" / "quantised.safetensors"
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights, metadata={"format": "pt"})
    relist(folder, "backbone/quantised.safetensors")
    return folder


def relist(folder, name):
    import hashlib

    path, manifest = folder / name, folder / "buddy.json"
    values = json.loads(manifest.read_text())
    data = path.read_bytes()
    values["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(values))


LAYER = "model.layers.2.mlp.up_proj"


def shorter(tensors):
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"][:-1].clone()


def shorter_both(tensors):
    for part in ("weight", "scales"):
        tensors[f"{LAYER}.{part}"] = tensors[f"{LAYER}.{part}"][:-1].clone()


def without_scales(tensors):
    del tensors[f"{LAYER}.scales"]


def without_weight(tensors):
    del tensors[f"{LAYER}.weight"]


def without_both(tensors):
    del tensors[f"{LAYER}.weight"], tensors[f"{LAYER}.scales"]


def not_finite(tensors):
    tensors[f"{LAYER}.scales"][0] = torch.nan


def flat(tensors):
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].flatten()


def minimums_of_a_part(tensors):
    tensors[f"{LAYER}.minimums"] = tensors[f"{LAYER}.scales"][:-1].clone()


def minimums_alone(tensors):
    tensors["model.norm.minimums"] = torch.zeros(1)


def units_without_minimums(tensors):
    tensors[f"{LAYER}.units"] = torch.zeros(1)


def of_a_norm(tensors):
    tensors["model.norm.weight"] = torch.zeros(1, 32, dtype=torch.int8)
    tensors["model.norm.scales"] = torch.zeros(1)


@pytest.mark.parametrize(
    "change",
    [
        shorter,
        shorter_both,
        without_scales,
        without_weight,
        without_both,
        not_finite,
        flat,
        minimums_of_a_part,
        minimums_alone,
        units_without_minimums,
        of_a_norm,
    ],
)
def test_damaged_weights_are_refused(tmp_path, change):
    _, folder = quantised(tmp_path)
    with pytest.raises(CheckpointError, match=r" damaged[:,]| do not fit its config") as refused:
        BuddyForCausalLM.from_pretrained(damaged(folder, change))
    assert "\n" not in str(refused.value)


def head_of_4_bits(tensors):
    rows, columns = tensors["lm_head.weight"].shape
    tensors["lm_head.weight"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    tensors["lm_head.scales"] = torch.ones(rows, columns // 32)


def test_an_output_projection_of_4_bits_is_refused_as_token_ids_are_embedded_by_it(tmp_path):
    _, folder = quantised(tmp_path)
    with pytest.raises(CheckpointError, match="lm_head has no weights in 8 bits with scales"):
        BuddyForCausalLM.from_pretrained(damaged(folder, head_of_4_bits))


def test_a_manifest_that_names_other_weights_is_refused(tmp_path):
    _, folder = quantised(tmp_path)
    values = json.loads((folder / "buddy.json").read_text())
    values["base"]["source"] = str(tmp_path / "base")
    (folder / "buddy.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="source names others"):
        BuddyForCausalLM.from_pretrained(folder)


def test_a_config_that_says_less_is_refused(tmp_path):
    _, folder = quantised(tmp_path)
    shutil.copy(tmp_path / "base" / "config.json", folder / "backbone" / "config.json")
    with pytest.raises(CheckpointError):  # its contents are not those that are listed
        BuddyForCausalLM.from_pretrained(folder)


def test_the_command_saves_what_quant_loads(tmp_path):
    model, _ = quantised(tmp_path)
    out = tmp_path / "int4"
    arguments = ["models", "quantise", str(tmp_path / "base"), "--quant", "int4", "--out", str(out)]
    done = forked.run(arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}\n"
    loaded = BuddyForCausalLM.from_pretrained(out, policy="static:2,4,1,3")
    assert torch.equal(logits(loaded)[0], logits(model)[0])
    again = forked.run(["models", "quantise", str(out), *arguments[3:]])
    assert "is there already: name a new or an empty folder" in again.stderr
    within = forked.run([*arguments[:2], str(out), *arguments[3:5], "--out", str(out / "inner")])
    assert "lies within" in within.stderr
    assert "in int4, with any adapter folded in" in (out / "README.md").read_text()
    assert loaded.facts()["quant"] == "int4"
    assert "_name_or_path" not in (out / "backbone" / "config.json").read_text()


def test_a_manifest_that_names_another_quantisation_is_refused(tmp_path):
    _, folder = quantised(tmp_path)
    values = json.loads((folder / "buddy.json").read_text())
    values["base"]["quant"] = "int8"
    (folder / "buddy.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="saved in int8, and they are in int4"):
        BuddyForCausalLM.from_pretrained(folder)
