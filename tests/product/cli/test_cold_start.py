"""A model that this machine knows is run without transformers' code for models and generation."""

import json
import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

from buddy import BuddyForCausalLM
from buddy.checkpoint.resolve import resolve
from buddy.hub.folder import cache_home
from buddy.inference import InferenceModel
from tests.product.serving.serving import chat_tokenizer
from tests.tiny import random_router, tiny_model

RUN = """
import atexit, json, re, sys
from buddy.checkpoint import resolve
from buddy.cli.main import main

HEAVY = re.compile(r"peft|torch._dynamo|transformers[.](generation[.]utils|modeling_utils|models)")
read, tokenizers = resolve.read_tokenizer, []
resolve.read_tokenizer = lambda folder: tokenizers.append(str(folder)) or read(folder)
atexit.register(lambda: print(json.dumps([[*filter(HEAVY.match, sys.modules)], len(tokenizers)])))
sys.argv = ["buddy", *sys.argv[1:]]
main()
"""


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with a router, and its base model beside it."""
    tiny_model("llama-mha").save_pretrained(tmp_path / "base")
    chat_tokenizer().save_pretrained(tmp_path / "base")
    base = BuddyForCausalLM.from_pretrained(tmp_path / "base", engine="general")
    routed = BuddyForCausalLM(base.model, router=random_router(base.model), origin=base.origin)
    routed.save_pretrained(tmp_path / "routed")
    return tmp_path / "routed"


@pytest.fixture
def known(folder, tmp_path_factory):
    """The environment of a machine that has loaded the model, and compiled the kernel."""
    resolved = resolve(folder)
    InferenceModel.load(resolved, engine="general")
    resolved.load_tokenizer()
    home = tmp_path_factory.getbasetemp() / "home"
    if not (home / "native").exists():
        (home / "native").symlink_to(cache_home() / "native", target_is_directory=True)
    return {**os.environ, "BUDDY_HOME": str(home)}


def command(*arguments):
    return [sys.executable, "-c", RUN, *map(str, arguments)]


def test_generate_imports_what_it_runs_and_reads_the_tokenizer_once(folder, known):
    asked = ("generate", "w3 w5", "--model", folder, "--engine", "native", "--max-new-tokens", "4")
    sampled = ("--budget", "4 blocks", "--temperature", "0.7", "--top-p", "0.8")
    done = subprocess.run(
        command(*asked, *sampled), env=known, capture_output=True, text=True, check=True
    )
    assert "native engine" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[], 1]


def test_serve_imports_what_it_runs_and_reads_the_tokenizer_once(folder, known):
    asked = ("serve", "--model", folder, "--engine", "native", "--port", "0", "--max-rows", "1")
    with subprocess.Popen(
        command(*asked), env=known, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        told = ""
        while "keys:" not in told:
            line = server.stderr.readline()
            assert line, told
            told += line
        url = re.search(r"address: (\S+)", told)[1]
        asked = {"prompt": "w3 w5", "max_tokens": 3, "budget": 0.8}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
        server.send_signal(signal.SIGTERM)
        out, _ = server.communicate(timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert json.loads(out.splitlines()[-1]) == [[], 1]
