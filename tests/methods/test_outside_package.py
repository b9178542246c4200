"""A method is a folder, of ours or of a package outside; a broken one harms no other."""

import json
import os
import shutil
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch

import buddy.methods
from buddy.depth.policy import DepthPolicy, OnlinePolicy, PolicyResources
from buddy.errors import PolicyError, RecipeError
from buddy.policies import registry
from buddy.policies.learned import LearnedPart
from buddy.policies.registry import build_policy, find_method, methods, policy_names
from buddy.training.methods import read_method, trained_methods
from tests.product.cli import forked
from tests.product.training.made import write_rows
from tests.tiny import NUM_BLOCKS, tiny_model
from tests.words import word_tokenizer

OWN = EntryPoint("buddy", "buddy.methods", "buddy.methods")
FOLDERS = sorted(path.parent.name for path in Path(buddy.methods.__path__[0]).glob("*/method.py"))
LOADED = """
from buddy import BuddyForCausalLM
from buddy.policies.registry import build_policy, find_method

model = BuddyForCausalLM.from_pretrained({checkpoint!r})
assert type(model.policy) is find_method("toy").load("policy")
assert type(build_policy("toy", model.resources)) is type(model.policy)
print(model.policy.part.scores.tolist())
raise SystemExit  # before the command
"""


@pytest.fixture
def installed(tmp_path):
    """Where the toy method is installed beside Buddy, as pip would leave it."""
    shutil.copytree(Path(__file__).with_name("toy"), tmp_path / "buddy_toy")
    info = tmp_path / "buddy_toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: buddy-toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[buddy.methods]\ntoy = buddy_toy.method:METHOD\n")
    paths = [str(tmp_path), str(Path(registry.__file__).parents[2])]
    return {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}


def test_a_method_of_another_package_is_trained_and_loaded_by_its_name(tmp_path, installed):
    tiny_model().save_pretrained(tmp_path / "base")
    word_tokenizer().save_pretrained(tmp_path / "base")
    recipe, out = str(tmp_path / "recipe.toml"), tmp_path / "run"
    rows = write_rows(tmp_path / "rows.jsonl", 4)
    Path(recipe).write_text(
        f'method = "toy"\nseed = 3\n[model]\nname = "{tmp_path / "base"}"\n'
        f'[[data.train]]\npath = "{rows}"\n'
    )
    done = forked.run(["train", recipe, "--out", str(out)], installed)
    assert (done.returncode, done.stdout) == (0, f"{out / 'checkpoint'}\n"), done.stderr
    load = LOADED.format(checkpoint=str(out / "checkpoint"))
    loaded = forked.run([], installed, before=load)
    assert loaded.returncode == 0, loaded.stderr
    assert json.loads((out / "record.json").read_text())["results"]["rows"] == 4
    drawn = torch.rand(NUM_BLOCKS, generator=torch.Generator().manual_seed(3))
    assert json.loads(loaded.stdout) == pytest.approx(drawn.tolist())
    unknown = forked.run(["train", recipe, "--set", "seeds=1", "--out", str(out)], installed)
    assert unknown.returncode == 2
    assert "unknown key seeds: expected data, model, seed" in unknown.stderr


def test_every_folder_of_ours_with_a_method_is_found():
    assert {folder.replace("_", "-") for folder in FOLDERS} == {one.name for one in methods()}
    with_policy = Path(buddy.methods.__path__[0]).glob("*/policy.py")
    assert {path.parent.name for path in with_policy} == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_all_that_a_method_refers_to_is_there(folder):
    name = folder.replace("_", "-")
    method = find_method(name)
    policy, part = method.load("policy"), method.load("part")
    assert policy.name == name
    assert issubclass(policy, OnlinePolicy if not method.keeps_budget else DepthPolicy)
    assert part is None or (issubclass(part, LearnedPart) and part.policy == name)
    assert (method.load("recipe") is None) == (method.load("train") is None)
    assert name in policy_names()
    assert name in trained_methods()


def registered(monkeypatch, *entries):
    every = EntryPoints([OWN, *entries])
    monkeypatch.setattr(registry, "entry_points", lambda **chosen: every.select(**chosen))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("nowhere_at_all.method:METHOD", "No module named 'nowhere_at_all'"),
        ("nowhere_at_all", "No module named 'nowhere_at_all'"),
        ("json:METHOD", "no attribute 'METHOD'"),
        ("json:dumps", "is a function: expected a Method"),
    ],
)
def test_a_broken_method_is_one_line_and_all_others_work(monkeypatch, tmp_path, value, says):
    registered(monkeypatch, EntryPoint("wreck", value, "buddy.methods"))
    with pytest.raises(PolicyError, match=says) as refused:
        build_policy("wreck", PolicyResources(num_blocks=NUM_BLOCKS))
    assert "\n" not in str(refused.value)
    assert build_policy("layerskip", PolicyResources(num_blocks=NUM_BLOCKS)).name == "layerskip"
    assert {"wreck", "pudding"} <= set(policy_names())
    assert "wreck" not in trained_methods()
    (tmp_path / "recipe.toml").write_text('method = "wreck"\n')
    with pytest.raises(RecipeError, match=says):
        read_method(tmp_path / "recipe.toml")


def test_a_method_of_ours_stays_ours(monkeypatch):
    registered(monkeypatch, EntryPoint("pudding", "json:dumps", "buddy.methods"))
    assert find_method("pudding").label == "PuDDing"


def test_an_installation_from_before_the_group_is_told_to_install_again(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda **chosen: EntryPoints())
    with pytest.raises(PolicyError, match=r"no policy 'pudding': .* install it again"):
        build_policy("pudding", PolicyResources(num_blocks=NUM_BLOCKS))


class WithoutBase:
    """A policy as it was written before there were base classes."""

    name, num_blocks, pinned, context_layer = "old", NUM_BLOCKS, (0, -1), 0

    @classmethod
    def from_spec(cls, argument, resources):
        return cls()


def test_a_policy_without_a_base_class_is_told_what_to_inherit(monkeypatch):
    entry = EntryPoint("old", f"{__name__}:WithoutBase", "buddy.policies")
    registered(monkeypatch, entry)
    assert "old" in policy_names()
    with pytest.raises(PolicyError, match=r"WithoutBase is no policy: .* inherit DepthPolicy"):
        build_policy("old", PolicyResources(num_blocks=NUM_BLOCKS))
