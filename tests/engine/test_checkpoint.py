"""Save and load: what comes back is what was saved, or a clear refusal."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model

from buddy import BuddyForCausalLM
from buddy.errors import CheckpointError, FamilyError, ModelError
from tests.tiny import random_ids, random_router, tiny_model

IDS = random_ids(3, 9)


def logits(model, **options):
    with torch.no_grad():
        out = model(IDS, budget=[0.5, "4 blocks", 1.0], **options)
    return out.logits, out.plan.keys


@pytest.fixture
def routed():
    model = tiny_model("qwen3")
    prior = torch.tensor([0.3, -0.4, 1.2, -1.1])
    return BuddyForCausalLM(
        model, router=random_router(model, prior=prior), prior=prior, kv_policy="mask"
    )


@pytest.fixture
def adapted():
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return BuddyForCausalLM(model.eval(), router=random_router(tiny_model()))


def test_round_trip_with_router_and_prior(routed, tmp_path):
    routed.save_pretrained(tmp_path / "model")
    loaded = BuddyForCausalLM.from_pretrained(tmp_path / "model")
    before, after = logits(routed), logits(loaded)
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert loaded.kv_policy == "mask"
    assert torch.equal(loaded.prior, routed.prior)
    assert len(set(before[1])) > 1


@pytest.mark.parametrize("merge", [False, True])
def test_round_trip_with_adapter(adapted, tmp_path, merge):
    plain = BuddyForCausalLM(tiny_model(), router=random_router(tiny_model()))
    adapted.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model/adapter/adapter_model.safetensors").is_file()
    loaded = BuddyForCausalLM.from_pretrained(tmp_path / "model", merge_adapter=merge)
    # atol: merging adds the product to the weights before, not after, the multiplication.
    torch.testing.assert_close(logits(loaded)[0], logits(adapted)[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits(plain)[0], logits(adapted)[0], atol=1e-2)


def test_a_model_with_a_source_is_saved_without_its_backbone(routed, tmp_path):
    routed.model.save_pretrained(tmp_path / "base")
    base = BuddyForCausalLM.from_pretrained(tmp_path / "base")
    base.router = routed.router
    base.save_pretrained(tmp_path / "small")
    assert not (tmp_path / "small/backbone").exists()
    again = BuddyForCausalLM.from_pretrained(tmp_path / "small", policy="routed")
    assert torch.equal(logits(again)[0], logits(routed)[0])


def test_saving_again_replaces_the_checkpoint_and_nothing_else(routed, tmp_path):
    target = tmp_path / "model"
    routed.save_pretrained(target)
    routed.kv_policy = "zero"
    routed.save_pretrained(target)
    assert BuddyForCausalLM.from_pretrained(target).kv_policy == "zero"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="no Buddy checkpoint"):
        routed.save_pretrained(other)
    assert (other / "chapter.txt").read_text() == "years of work"


def test_a_save_that_fails_leaves_the_old_checkpoint(routed, tmp_path, monkeypatch):
    target = tmp_path / "model"
    routed.save_pretrained(target)
    monkeypatch.setattr(
        "safetensors.torch.save_file",
        lambda *args, **kwargs: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(CheckpointError, match="No space left"):
        routed.save_pretrained(target)
    assert logits(BuddyForCausalLM.from_pretrained(target))[1] == logits(routed)[1]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def _truncate(folder):
    file = folder / "routing.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _flip(folder):
    file = folder / "routing.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))


def _manifest(change):
    def spoil(folder):
        path = folder / "buddy.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_truncate, "expected .* bytes"),
        (_flip, "changed or damaged"),
        (lambda folder: (folder / "routing.safetensors").unlink(), "is missing"),
        (lambda folder: (folder / "backbone/model.safetensors").unlink(), "is missing"),
        (lambda folder: (folder / "buddy.json").write_text("{"), "damaged"),
        (lambda folder: (folder / "buddy.json").write_text("[]"), "damaged"),
        (_manifest(lambda m: m.pop("router")), "damaged"),
        (_manifest(lambda m: m.update(format=99)), "format 99"),
        (_manifest(lambda m: m["base"].update(num_blocks=9)), "another base model: num_blocks"),
        (_manifest(lambda m: m["base"].update(fingerprint="x")), "another base model"),
        (_manifest(lambda m: m["router"].update(num_blocks=9)), "does not fit"),
        (_manifest(lambda m: m["router"].update(extra=1)), "does not fit"),
    ],
)
def test_a_spoilt_checkpoint_is_refused(routed, tmp_path, spoil, says):
    routed.save_pretrained(tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(CheckpointError, match=says) as caught:
        BuddyForCausalLM.from_pretrained(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_folders_that_are_no_model_are_refused(tmp_path):
    with pytest.raises(ModelError, match="no model at"):
        BuddyForCausalLM.from_pretrained(tmp_path / "absent")
    with pytest.raises(ModelError, match="no model named 'nonsense'"):
        BuddyForCausalLM.from_pretrained("nonsense")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        BuddyForCausalLM.from_pretrained(tmp_path)
    tiny_model().save_pretrained(tmp_path / "base")
    weights = tmp_path / "base/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        BuddyForCausalLM.from_pretrained(tmp_path / "base")
    weights.unlink()
    torch.save({}, tmp_path / "base/pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"found only pytorch_model\.bin"):
        BuddyForCausalLM.from_pretrained(tmp_path / "base")


def test_an_unknown_family_says_how_to_add_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FamilyError, match="add a row to FAMILIES"):
        BuddyForCausalLM.from_pretrained(tmp_path)


def test_an_adapter_in_another_format_is_not_read(adapted, tmp_path):
    adapted.save_pretrained(tmp_path / "model")
    shutil.move(
        tmp_path / "model/adapter/adapter_model.safetensors",
        tmp_path / "model/adapter/adapter_model.bin",
    )
    manifest = json.loads((tmp_path / "model/buddy.json").read_text())
    del manifest["files"]["adapter/adapter_model.safetensors"]
    (tmp_path / "model/buddy.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="could run code"):
        BuddyForCausalLM.from_pretrained(tmp_path / "model")
