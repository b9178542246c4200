"""What ships trained: small, whole, and made by a recipe whose record is committed."""

import json
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors.torch import load_file

from buddy.checkpoint.listed_files import check_files
from buddy.checkpoint.manifest import read_manifest
from buddy.checkpoint.resolve import shipped_checkpoint
from buddy.hub.presets import DEFAULT_MODEL, PRESETS, ROUTED_MODEL

REPOSITORY = Path(__file__).parents[3]


SHIPPED = [name for name, preset in PRESETS.items() if preset.trained]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_checkpoint_is_whole_and_small(name):
    folder = shipped_checkpoint(name)
    manifest = read_manifest(folder)
    check_files(folder, manifest.files)
    assert manifest.policy == "routed"
    assert manifest.base.source in (PRESETS[name].hub_id or PRESETS)
    assert sum(path.stat().st_size for path in folder.rglob("*")) < 25e6
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} <= {
        ".json",
        ".md",
        ".safetensors",
    }


def test_its_record_says_how_it_was_made():
    record = json.loads((REPOSITORY / "results/training/smollm2-135m.json").read_text())
    assert record["kind"] == "training"
    assert record["command"].startswith("buddy train recipes/smollm2-135m.toml")
    manifest = read_manifest(shipped_checkpoint(ROUTED_MODEL))
    assert asdict(manifest.router.planner) == record["config"]["router"]["planner"]


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("smollm2-135m-routed", "smollm2-135m"),
        ("qwen2.5-coder-0.5b", "qwen2.5-coder-0.5b"),
        ("qwen2.5-coder-1.5b", "qwen2.5-coder-1.5b"),
    ],
)
def test_a_router_for_frozen_weights_is_that_of_its_record(name, of):
    record = json.loads((REPOSITORY / f"results/routing/{of}.json").read_text())
    folder = shipped_checkpoint(name)
    manifest = read_manifest(folder)
    assert record["kind"] == "training-route"
    # The hub's weights are other numbers than those of the file that it was made on.
    assert manifest.base.fingerprint in (record["model"]["base"], None)
    assert (manifest.base.fingerprint is None) == (PRESETS[name].hub_id is not None)
    assert not any(name.startswith("adapter") for name in manifest.files)
    prior = load_file(folder / "routing.safetensors")["prior"]
    common = record["results"]["orders"][record["results"]["common"]]
    assert [int(block) + 1 for block in prior.argsort()] == common
    tables = runpy.run_path(str(REPOSITORY / "benchmarks/route_table.py"))
    assert tables["by_depth"](record) in (folder / "README.md").read_text()


def test_names_that_ship_nothing():
    assert shipped_checkpoint("smollm2-135m") is None
    assert shipped_checkpoint("some/other") is None


@pytest.mark.real
def test_it_routes_each_prompt_by_itself_and_picks_budgets():
    from buddy import BuddyForCausalLM, load_tokenizer

    model = BuddyForCausalLM.from_pretrained(ROUTED_MODEL, merge_adapter=True)
    tokenizer = load_tokenizer(ROUTED_MODEL)
    prompts = ["Name three fruits.", "def add(a, b):\n    return", "1 + 1 =", "Question: Is it?"]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    out = model(**inputs, budget="18 blocks")
    assert out.executed_blocks.tolist() == [18] * 4
    assert len(set(out.plan.executed_sets)) > 1
    assert model.policy.name == "routed"


@pytest.mark.real
def test_loading_it_warns_of_nothing():
    code = "import buddy; buddy.BuddyForCausalLM.from_pretrained('smollm2-135m-buddy')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.real
def test_full_depth_of_the_router_for_frozen_weights_is_that_of_its_base():
    import torch

    from buddy import BuddyForCausalLM, load_tokenizer

    base = BuddyForCausalLM.from_pretrained(DEFAULT_MODEL)
    routed = BuddyForCausalLM.from_pretrained("smollm2-135m-routed")
    inputs = load_tokenizer("smollm2-135m-routed")(["Tom has 3 apples."], return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(routed(**inputs).logits, base(**inputs).logits)
