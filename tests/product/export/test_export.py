"""An export says what Buddy runs: its weights, and from token ids alone each prompt's plan."""

import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from buddy import BuddyForCausalLM
from buddy.backbone.quantised import quantise_backbone
from buddy.checkpoint.resolve import load_tokenizer
from buddy.cli.main import app
from buddy.errors import CheckpointError, FamilyError, PolicyError
from buddy.export.folder import EXPORT_MANIFEST, export_model
from tests.disks import full_disk
from tests.tiny import (
    NUM_BLOCKS,
    VOCAB,
    random_ids,
    random_predictor,
    random_router,
    tiny_buddy,
    tiny_model,
)
from tests.words import word_tokenizer

PACKAGE = Path(__file__).parents[3] / "packages" / "buddy-vllm" / "src"


@pytest.fixture
def planner(monkeypatch):
    """The plugin's own reading of an export, which imports nothing of Buddy."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    from buddy_vllm.plan import Planner

    yield Planner.of_folder
    for name in [one for one in sys.modules if one.startswith("buddy_vllm")]:
        del sys.modules[name]


def exported(model, folder):
    return export_model(model, folder, tokenizer=word_tokenizer(), source="tiny").folder


def quantised():
    model = tiny_buddy()
    quantise_backbone(model.backbone, "int8")
    return model


def prompts(rows, *, seed=0):
    """Prompts of 1 to 12 tokens, with repeats among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (rows,), generator=generator).tolist()
    return [random_ids(1, length, seed=seed + row) for row, length in enumerate(lengths)]


READ = {
    "mean": ("llama", {}),
    "qwen2.5": ("qwen2.5", {}),
    "ema": ("llama", {"summary": "ema", "ema_decay": 0.5}),
    "last": ("llama", {"summary": "mean+last"}),
    "scores": ("llama", {"pool": "scores"}),
    "scores-ema": ("qwen2.5", {"pool": "scores", "summary": "ema", "ema_decay": 0.7}),
}


@pytest.mark.parametrize("read", READ)
def test_the_plans_of_an_export_are_the_routers_own(read, planner, tmp_path):
    family, reads = READ[read]
    model = tiny_buddy(family, predictor=True, **reads)
    planned = planner(exported(model, tmp_path / "out"))
    budgets = ["3 blocks", 0.7, 1.0, "auto"]
    plans, chosen = set(), set()
    with torch.no_grad():
        for ids in prompts(12):
            out = model(ids.expand(len(budgets), -1), budget=budgets)
            found = [planned.plan(budget, ids[0].tolist()).blocks for budget in budgets]
            assert found == list(out.plan.executed_sets)
            plans |= set(found)
            chosen.add(len(found[-1]))
    assert len(plans) > 4
    assert len(chosen) > 1 or "pool" in reads  # pooled scores tell prompts apart less


def test_a_static_order_is_nested_and_the_predictor_still_chooses(planner, tmp_path):
    model = tiny_buddy(predictor=True, policy="static:4,2,1,3")
    read = planner(exported(model, tmp_path / "out"))
    sets = [set(read.plan(f"{n} blocks", [5]).blocks) for n in range(3, NUM_BLOCKS + 1)]
    assert all(small < large for small, large in pairwise(sets))
    assert sets[1] == {0, 1, 3, 5}
    with torch.no_grad():
        for ids in prompts(20):
            out = model(ids, budget="auto")
            assert read.plan("auto", ids[0].tolist()).blocks == out.plan.executed_sets[0]


def test_a_prior_that_nobody_measured_is_measured_for_the_export(planner, tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    word_tokenizer().save_pretrained(tmp_path / "base")
    model = BuddyForCausalLM.from_pretrained(tmp_path / "base")
    read = planner(exported(model, tmp_path / "out"))
    ids = random_ids(1, 5)
    with torch.no_grad():
        assert (
            read.plan(0.5, ids[0].tolist()).blocks == (model(ids, budget=0.5).plan.executed_sets[0])
        )
    assert "prior" in load_file(tmp_path / "out" / "buddy" / "routing.safetensors")


def test_wishes_of_makers_that_transformers_would_not_write_are_exported(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    wishes = {"temperature": 0.9, "top_p": 0.6}
    (tmp_path / "base/generation_config.json").write_text(json.dumps(wishes))
    model = BuddyForCausalLM.from_pretrained(tmp_path / "base", policy="static:4,2,1,3")
    exported(model, tmp_path / "out")
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert wishes.items() <= written.items()


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2.5"])
def test_the_weights_are_the_models_with_the_adapter_in_them(family, tmp_path):
    lora = LoraConfig(r=4, target_modules="all-linear")
    adapted = get_peft_model(tiny_model(family), lora)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    tuned = BuddyForCausalLM(adapted.eval(), router=random_router(tiny_model(family)))
    tuned.save_pretrained(tmp_path / "tuned", tokenizer=word_tokenizer())
    with pytest.raises(CheckpointError, match="merge_adapter=True"):
        exported(tuned, tmp_path / "out")
    merged = BuddyForCausalLM.from_pretrained(tmp_path / "tuned", merge_adapter=True)
    exported(merged, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, merged.model(ids).logits)
        # 1e-4: merging adds in another order.
        assert_close(plain(ids).logits, adapted(ids).logits, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(plain(ids).logits, tiny_model(family)(ids).logits, atol=1e-2)
    said = json.loads((tmp_path / "out" / EXPORT_MANIFEST).read_text())
    assert said["model"]["adapter"] is not None
    if family == "llama":  # Qwen2 has a tokenizer class of its own
        assert load_tokenizer(tmp_path / "out")("w3 w5")["input_ids"] == [3, 5]


def test_the_revision_stands_for_every_file(tmp_path):
    model = tiny_buddy()
    first = export_model(model, tmp_path / "a", tokenizer=word_tokenizer(), source="tiny")
    again = export_model(model, tmp_path / "b", tokenizer=word_tokenizer(), source="tiny")
    assert first.revision == again.revision
    with torch.no_grad():
        model.router.decision.up.bias[0] += 1
    other = export_model(model, tmp_path / "a", tokenizer=word_tokenizer(), source="tiny")
    assert other.revision != first.revision
    said = json.loads((tmp_path / "a" / EXPORT_MANIFEST).read_text())
    assert said["revision"] == other.revision
    held = {
        path.relative_to(tmp_path / "a").as_posix()
        for path in (tmp_path / "a").rglob("*")
        if path.is_file()
    }
    assert set(said["files"]) == held - {EXPORT_MANIFEST}
    assert {Path(name).suffix for name in held} <= {".json", ".safetensors", ".jinja"}


def test_what_is_there_stays_where_an_export_fails(tmp_path, monkeypatch):
    exported(tiny_buddy(), tmp_path / "out")
    before = (tmp_path / "out" / EXPORT_MANIFEST).read_bytes()
    model = tiny_buddy()

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model.model, "save_pretrained", full)
    with pytest.raises(CheckpointError, match="what was there before is intact"):
        exported(model, tmp_path / "out")
    assert (tmp_path / "out" / EXPORT_MANIFEST).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("num_bytes", [1000, 20_000])  # of the tokenizer, of the weights
def test_a_full_disk_is_one_line_whichever_file_it_stops(tmp_path, num_bytes):
    model = tiny_buddy()
    with full_disk(num_bytes), pytest.raises(CheckpointError, match="File too large; what was"):
        exported(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_not_written_over(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="no export of Buddy"):
        exported(tiny_buddy(), tmp_path / "mine")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    exported(tiny_buddy(), tmp_path / "out")
    exported(tiny_buddy(), tmp_path / "out")  # an earlier export is
    (tmp_path / "out" / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match=r"holds 'letter.txt' beside a"):
        exported(tiny_buddy(), tmp_path / "out")
    assert (tmp_path / "out" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        (lambda: tiny_buddy(policy="random:1"), PolicyError, "policy 'random' cannot be exported"),
        (lambda: tiny_buddy(policy="full"), PolicyError, "expected routed, static"),
        (lambda: tiny_buddy(context="key"), PolicyError, "the key of block 1"),
        (lambda: tiny_buddy(context_layer=2), PolicyError, "the value of block 2"),
        (lambda: tiny_buddy("gemma"), FamilyError, "expected one of llama, qwen2"),
        (lambda: tiny_buddy("qwen2"), FamilyError, "sliding windows"),
        (quantised, CheckpointError, "fewer bits cannot be exported"),
    ],
    ids=["random", "full", "key", "deep", "family", "window", "quantised"],
)
def test_what_the_plugin_cannot_serve_is_refused(model, error, says, tmp_path):
    with pytest.raises(error, match=says):
        exported(model(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["tables", "order", "format"])
def test_a_damaged_export_is_refused_when_it_is_read(damage, planner, tmp_path):
    folder = exported(tiny_buddy(policy="static:4,2,1,3"), tmp_path / "out")
    said = json.loads((folder / EXPORT_MANIFEST).read_text())
    if damage == "tables":
        path = folder / "buddy" / "routing.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
        says = "has changed since the export"
    elif damage == "order":
        said["order"] = [4, 4, 1, 3]
        says = "names blocks twice"
    else:
        said["format"] = 2
        says = "has format 2"
    (folder / EXPORT_MANIFEST).write_text(json.dumps(said))
    with pytest.raises(ValueError, match=says):
        planner(folder)


def test_the_command_writes_what_the_library_does(tmp_path):
    model = tiny_model()
    router = random_router(model)
    made = BuddyForCausalLM(model, router=router, predictor=random_predictor(router))
    made.save_pretrained(tmp_path / "model", tokenizer=word_tokenizer())
    arguments = ["export", str(tmp_path / "model"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout == f"{tmp_path / 'out'}\n"
    assert "6 blocks · trained router · budget auto" in done.stderr
    tables = load_file(tmp_path / "out" / "buddy" / "routing.safetensors")
    assert tables["router.table"].shape == (VOCAB, 32)
    shutil.rmtree(tmp_path / "out")
    done = CliRunner().invoke(app, [*arguments, "--policy", "random:1"])
    assert isinstance(done.exception, PolicyError)
    assert not (tmp_path / "out").exists()
