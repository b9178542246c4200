"""Named models: regular names, facts that agree, and one clear line where one is refused."""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.cli.commands.models import pull
from buddy.errors import FetchError, ModelError
from buddy.hub.hugging_face import pull_from_hub
from buddy.hub.presets import PRESETS
from buddy.lab.paper.run import Request, Run
from tests.tiny import tiny_buddy, tiny_model
from tests.words import word_tokenizer

COMMIT = "0" * 40


class _Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one model, which is gated."""

    def __init__(self, hub_id, *args):
        self.hub_id = hub_id
        super().__init__(*args)

    def do_GET(self):
        listing = f"/api/models/{self.hub_id}"
        if self.path.startswith(f"{listing}/tree"):
            self._answer([{"type": "file", "path": "config.json", "size": 2, "oid": COMMIT}])
        elif self.path.startswith(listing):
            self._answer({"id": self.hub_id, "sha": COMMIT, "siblings": []})
        else:
            is_gated = self.path.startswith(f"/{self.hub_id}/")
            self.send_response(403 if is_gated else 401)
            self.send_header("X-Error-Code", "GatedRepo" if is_gated else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def _answer(self, contents):
        body = json.dumps(contents).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def hub():
    gated = PRESETS["llama-3.2-1b"].hub_id
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Hub, gated))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct is gated: accept its licence"),
        ("qwen3-0.6b", "the hub has no model Qwen/Qwen3-0.6B"),
    ],
)
def test_a_gated_model_and_a_missing_one_are_one_line_that_says_what_to_do(
    hub, tmp_path, name, says
):
    hosts = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    homes = {"HF_HOME": str(tmp_path / "hf"), "BUDDY_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "buddy", "models", "pull", name],
        env={**os.environ, **hosts, **homes},
        capture_output=True,
        text=True,
        check=False,
    )
    line = done.stderr.strip().splitlines()[-1]  # after the hub's own progress
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert line.startswith(f"buddy: {says}")
    assert "hf auth login" in line


@pytest.mark.parametrize(
    ("name", "says"), [("nonsense", "no model named 'nonsense'"), ("./nowhere", "no model at")]
)
def test_what_names_no_model_is_not_asked_of_the_hub(name, says, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", pytest.fail)
    with pytest.raises(ModelError, match=says):
        pull(name, wheel=None)


@pytest.mark.parametrize("lies_there", ["nothing", "a folder", "a checkpoint"])
def test_a_preset_is_the_preset_whatever_lies_in_the_current_folder(
    lies_there, tmp_path, monkeypatch
):
    name, fetched = "qwen3-0.6b", tmp_path / "fetched"
    tiny_model("qwen3").save_pretrained(fetched)
    word_tokenizer().save_pretrained(fetched)
    monkeypatch.setattr("buddy.hub.place.pull_from_hub", lambda *_, **__: str(fetched))
    monkeypatch.chdir(tmp_path)
    if lies_there == "a folder":
        (tmp_path / name).mkdir()
    elif lies_there == "a checkpoint":
        tiny_buddy(policy="random").save_pretrained(name, tokenizer=word_tokenizer())
    loaded = BuddyForCausalLM.from_pretrained(name)
    assert loaded.config.model_type == "qwen3"
    assert loaded.origin.source == name
    assert Run(Request(table="speed", model=name, out=tmp_path)).base() == name
    assert load_tokenizer(name).get_vocab() == word_tokenizer().get_vocab()
    loaded.save_pretrained("saved")
    assert BuddyForCausalLM.from_pretrained("saved").origin.source == name
    if lies_there == "a checkpoint":
        assert BuddyForCausalLM.from_pretrained(f"./{name}").policy.name == "random"


def test_a_hub_out_of_reach_is_one_line_that_says_why(monkeypatch):
    def unreachable(*args, **kwargs):
        raise LocalEntryNotFoundError("Got: ... in two sentences.") from OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(FetchError) as refused:
        pull_from_hub("org/name")
    says = (
        "org/name cannot be fetched from the hub: no route to host; check the name and the network"
    )
    assert str(refused.value) == says


def test_a_revision_that_is_not_there_is_named(monkeypatch):
    missing = RevisionNotFoundError("404 Client Error.", response=Mock(headers={}))
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=missing))
    with pytest.raises(FetchError, match=r"^the hub has no revision 'v9' of org/name: check it$"):
        pull_from_hub("org/name@v9")


def test_names_are_regular_and_facts_hold_together():
    for name, preset in PRESETS.items():
        assert re.fullmatch(r"[a-z]+[0-9.]*(-[0-9.]+|-coder)?-[0-9.]+[mb](-buddy|-routed)?", name)
        size = re.sub("-(buddy|routed)$", "", name).rsplit("-", 1)[1]
        billions = float(size[:-1]) / (1000 if size.endswith("m") else 1)
        assert preset.params / 1e9 == pytest.approx(billions, rel=0.25)
        assert preset.gated == preset.licence.endswith("Community")
        if preset.hub_id is not None and preset.download_gb is not None:
            # 16 bits a parameter; tied embeddings may be stored twice.
            assert 0.99 < preset.download_gb / (2e-9 * preset.params) < 1.3
    assert PRESETS["qwen2.5-3b"].licence == "Qwen Research"
    hub_ids = [preset.hub_id for preset in PRESETS.values() if preset.hub_id is not None]
    assert len(set(hub_ids)) == len(hub_ids)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of the hub, and what was asked of it: revisions, and files by name."""
    hub, cache, asked = tmp_path / "hub", tmp_path / "cache", []

    def snapshot(name, *, revision, allow_patterns):
        files = [path.relative_to(hub).as_posix() for path in hub.rglob("*") if path.is_file()]
        chosen = filter_repo_objects(files, allow_patterns=allow_patterns)
        for file in chosen:
            target = cache / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(hub / file, target)
        asked.append((name, revision))
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    return hub, cache, asked


def test_only_what_is_read_is_fetched_from_the_hub(repository):
    hub, cache, _ = repository
    tiny_model("qwen3").save_pretrained(hub, max_shard_size="30KB")
    word_tokenizer().save_pretrained(hub)
    shards = {path.name for path in hub.glob("model-*.safetensors")}
    assert len(shards) > 1
    others = ("consolidated.safetensors", "consolidated.00.pth", "original/params.json")
    others += ("original/tokenizer.model", "onnx/config.json", "model-00009-of-00009.safetensors")
    for name in (*others, "README.md", "model.py", "pytorch_model.bin"):
        (hub / name).parent.mkdir(exist_ok=True)
        (hub / name).write_text("{}")
    pull_from_hub("org/name", config_only=True)
    assert [path.name for path in cache.iterdir()] == ["config.json"]
    loaded = BuddyForCausalLM.from_pretrained("org/name")
    assert loaded.config.model_type == "qwen3"
    fetched = {path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file()}
    assert shards <= fetched
    assert fetched - shards == {
        *("config.json", "generation_config.json", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    }


def test_a_revision_may_be_pinned_and_is_kept(repository, tmp_path):
    hub, _, asked = repository
    tiny_model("qwen3").save_pretrained(hub)
    loaded = BuddyForCausalLM.from_pretrained("org/name@v1.0")
    assert set(asked) == {("org/name", "v1.0")}
    loaded.save_pretrained(tmp_path / "saved")
    asked.clear()
    assert BuddyForCausalLM.from_pretrained(tmp_path / "saved").origin.source == "org/name@v1.0"
    assert set(asked) == {("org/name", "v1.0")}
    asked.clear()
    BuddyForCausalLM.from_pretrained("org/name")
    assert set(asked) == {("org/name", None)}
    with pytest.raises(ModelError, match="or org/name@revision"):
        BuddyForCausalLM.from_pretrained("org/name@")
