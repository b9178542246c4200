"""Records say where they come from: in which commit of Buddy's source, and by which command."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import buddy
from buddy.provenance import COMMIT_FILE, own_commit
from buddy.records import RunRecord, command_line, read_record
from tests.test_docs import LINK, PAGES, ROOT

SOURCE = ROOT / "src" / "buddy" / "provenance.py"
CLEAN = re.compile(r"[0-9a-f]{12}")

NO_COMMIT = "made before records carried a commit: its run had no git to ask"
CHANGED = "made before records had to: from a source that was changed and not committed as it was"
OLD = {
    "results/decode-quality-choice-order.json": NO_COMMIT,
    "results/decode-quality.json": NO_COMMIT,
    "results/eval/rouge.json": NO_COMMIT,
    "results/eval/tasks-smollm2-135m.json": NO_COMMIT,
    "results/eval/tasks-static-joined.json": NO_COMMIT,
    "results/importance/answers-choice-random.json": NO_COMMIT,
    "results/importance/answers-choice-tuned.json": NO_COMMIT,
    "results/importance/cosine.json": CHANGED,
    "results/importance/exchanges-choice-15.json": NO_COMMIT,
    "results/importance/exchanges-gsm8k-15.json": NO_COMMIT,
    "results/importance/fisher.json": CHANGED,
    "results/importance/grad-norm.json": CHANGED,
    "results/importance/ppl.json": CHANGED,
    "results/importance/searched.json": NO_COMMIT,
    "results/importance/shortgpt-sleb.json": NO_COMMIT,
    "results/importance/shortgpt.json": CHANGED,
    "results/importance/sleb.json": CHANGED,
    "results/importance/taylor-plus.json": CHANGED,
    "results/importance/taylor.json": CHANGED,
    "results/training/answers-choice-order.json": NO_COMMIT,
    "results/training/answers-four-orders.json": NO_COMMIT,
    "results/training/answers-frozen.json": NO_COMMIT,
    "results/training/answers-kinds.json": NO_COMMIT,
    "results/training/answers-random-choice.json": NO_COMMIT,
    "results/training/answers-smollm2-135m-1.json": NO_COMMIT,
    "results/training/answers-smollm2-135m.json": NO_COMMIT,
    "results/training/answers-static-joined-1.json": NO_COMMIT,
    "results/training/answers-static-joined.json": NO_COMMIT,
    "results/training/answers-static.json": NO_COMMIT,
    "results/training/answers-tuned-order.json": NO_COMMIT,
    "results/training/four-orders.json": CHANGED,
    "results/training/fresh-smollm2-135m-1.json": NO_COMMIT,
    "results/training/fresh-smollm2-135m.json": NO_COMMIT,
    "results/training/fresh-static-joined-1.json": NO_COMMIT,
    "results/training/fresh-static-joined.json": NO_COMMIT,
    "results/training/frozen.json": NO_COMMIT,
    "results/training/kinds.json": NO_COMMIT,
    "results/training/measured-swaps.json": NO_COMMIT,
    "results/training/nested.json": CHANGED,
    "results/training/predictor-static.json": CHANGED,
    "results/training/predictor-600.json": NO_COMMIT,
    "results/training/random-choice.json": NO_COMMIT,
    "results/training/random.json": CHANGED,
    "results/training/sleb-15.json": CHANGED,
    "results/training/sleb-22.json": CHANGED,
    "results/training/smollm2-135m-1.json": NO_COMMIT,
    "results/training/smollm2-135m-600.json": NO_COMMIT,
    "results/training/static-joined-1.json": NO_COMMIT,
    "results/training/static-joined.json": NO_COMMIT,
    "results/training/static.json": CHANGED,
    "results/training/tuned-order.json": NO_COMMIT,
}
"""Quoted records that do not say from which commit they are, and why. None may be added: make a
record again instead. What is listed and need not be fails too."""


def git(folder, *arguments):
    """What git says, whoever runs the tests; None where it refuses."""
    settings = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *settings, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else None


def repository(folder):
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / "theirs.txt").write_text("x")
    git(folder, "add", "theirs.txt")
    assert git(folder, "commit", "-qm", "Theirs") is not None
    return folder


def commit_of(path):
    """What a copy of the source, at another place, says of itself."""
    return runpy.run_path(str(path))["own_commit"]()


def test_a_copy_within_another_repository_does_not_take_that_ones_commit(tmp_path, monkeypatch):
    other = repository(tmp_path / "other")
    copy = other / ".venv" / "site-packages" / "buddy" / SOURCE.name
    copy.parent.mkdir(parents=True)
    shutil.copy(SOURCE, copy)
    assert commit_of(copy) is None
    # Nor where git's own variables name it, as in a hook.
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(copy.parent))
    assert commit_of(copy) is None
    (copy.parent / COMMIT_FILE).write_text("0123456789ab\n")  # as a wheel has it
    assert commit_of(copy) == "0123456789ab"


def test_a_checkout_names_its_commit_and_whether_it_was_changed(tmp_path):
    folder = repository(tmp_path / "checkout")
    copy = folder / "src" / "buddy" / SOURCE.name
    copy.parent.mkdir(parents=True)
    shutil.copy(SOURCE, copy)
    git(folder, "add", "src")
    git(folder, "commit", "-qm", "Ours")
    git(folder, "tag", "-a", "v9", "-m", "A tag is no commit")
    head = git(folder, "rev-parse", "--short=12", "HEAD")
    assert commit_of(copy) == head
    (folder / "theirs.txt").write_text("y")
    assert commit_of(copy) == f"{head}-dirty"


def test_without_git_or_a_repository_the_commit_is_not_known(tmp_path, monkeypatch):
    copy = tmp_path / SOURCE.name
    shutil.copy(SOURCE, copy)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of(copy) is None
    monkeypatch.setenv("PATH", "")
    assert commit_of(copy) is None


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An sdist of a checkout, a wheel of it, and a wheel of what the sdist unpacks to."""
    pytest.importorskip("hatchling")
    folder = repository(tmp_path_factory.mktemp("build") / "checkout")
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    for part in ("buddy/__init__.py", "buddy/provenance.py"):
        place = folder / "src" / part
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "src" / part, place)
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "All")
    build = "import sys; from hatchling import build as b; getattr(b, sys.argv[1])(sys.argv[2])"

    def run(what, where, out):
        subprocess.run([sys.executable, "-c", build, what, str(out)], cwd=where, check=True)
        return next(out.iterdir())

    outs = [folder.parent / name for name in ("sdist", "wheel", "unpacked", "again")]
    for out in outs:
        out.mkdir()
    sdist = run("build_sdist", folder, outs[0])
    with tarfile.open(sdist) as archive:
        archive.extractall(outs[2], filter="data")
    assert git(folder, "status", "--porcelain") == ""  # nothing was written into the checkout
    wheels = (
        run("build_wheel", folder, outs[1]),
        run("build_wheel", next(outs[2].iterdir()), outs[3]),
    )
    return git(folder, "rev-parse", "--short=12", "HEAD"), wheels


def test_a_wheel_carries_the_commit_that_it_was_built_from(built):
    head, wheels = built
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            assert archive.read(f"buddy/{COMMIT_FILE}").decode() == f"{head}\n"


def test_a_record_has_version_commit_model_and_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/buddy/__main__.py", "bench", "--out", "a b"])
    assert command_line() == "buddy bench --out 'a b'"
    monkeypatch.setattr(sys, "argv", ["benchmarks/engine.py", "--out", "x"])
    path, model = tmp_path / "r.json", {"num_blocks": 6, "base": "b" * 64}
    RunRecord(kind="x", config={}, results={}, model=model).save(path)
    found = read_record(path)
    assert found["command"] == "python benchmarks/engine.py --out x"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found["versions"]["buddy-llm"] == buddy.__version__ == project["version"]
    assert found["model"] == model
    assert found["commit"] == own_commit()


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("flags\t\t: fpu avx512_bf16 avx2 avx512f\n", "avx2 avx512f avx512_bf16"),
        ("Features\t: fp asimd bf16\n", "asimd bf16"),
        ("", ""),
    ],
)
def test_a_record_names_the_instructions_that_decide_speed(said, named, monkeypatch):
    told = {"commit": None, "versions": {}, "command": ""}
    monkeypatch.setattr(Path, "read_text", lambda path: f"model name : A Core\n{said}" * 2)
    machine = RunRecord(kind="x", config={}, results={}, model=None, **told).machine
    assert (machine["processor"], machine["instructions"]) == ("A Core", named)


def quoted():
    """The committed records that the pages link to, one by one or by their folder."""
    found = set()
    for page in PAGES:
        for link in LINK.findall(page.read_text()):
            path = (page.parent / link).resolve()
            if path.is_relative_to(ROOT / "results"):
                found |= {path} if path.is_file() else set(path.rglob("*.json"))
    records = {path: json.loads(path.read_text()) for path in sorted(found)}
    return {
        path.relative_to(ROOT).as_posix(): one for path, one in records.items() if "kind" in one
    }


def is_from_a_commit(record):
    """Or from between a commit and its child, which added the record: see `added_in`."""
    commit = str(record.get("commit"))
    return CLEAN.fullmatch(commit) is not None or "added_in" in record


QUOTED = quoted()


def test_what_the_pages_quote_has_version_and_command():
    lacking = [
        name
        for name, one in QUOTED.items()
        if not one.get("command") or not one.get("versions", {}).get("buddy-llm")
    ]
    assert lacking == []


def test_what_the_pages_quote_is_from_a_commit_but_for_old_records():
    assert {name for name, one in QUOTED.items() if not is_from_a_commit(one)} == OLD.keys()


def test_records_that_name_no_model_are_no_newer_than_this_law():
    newer = [
        name
        for name, one in QUOTED.items()
        if "model" not in one and one["created"] > "2026-11-22T14"
    ]
    assert newer == []


@pytest.mark.parametrize("name", [name for name, one in QUOTED.items() if "added_in" in one])
def test_a_record_that_a_commit_added_was_made_on_the_parent_of_that_commit(name):
    record = dict(QUOTED[name])
    added, base = record.pop("added_in"), record["commit"].removesuffix("-dirty")
    assert record["created"] < "2026-11-22T13"  # newer ones have a commit of their own
    there = git(ROOT, "show", f"{added}:{name}")
    if there is None:
        pytest.skip("the history is not here")
    assert json.loads(there) == record
    assert git(ROOT, "rev-parse", "--short=12", f"{added}^") == base
