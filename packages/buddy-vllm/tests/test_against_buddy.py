"""Plans that are fixed equal Buddy's own engine, on exports that `buddy export` wrote."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from buddy_vllm.plan import Planner
from engines import run_engine

BUDDY = os.environ.get("BUDDY_PYTHON")
NAMES = ("llama-routed", "llama-ema", "qwen2-routed", "qwen2-static")
pytestmark = pytest.mark.skipif(
    BUDDY is None, reason="BUDDY_PYTHON names no interpreter that has Buddy"
)


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Exports, and what Buddy says of them."""
    folder = tmp_path_factory.mktemp("buddy")
    script = Path(__file__).parent / "buddy_expected.py"
    done = subprocess.run(
        [BUDDY, str(script), str(folder)],
        env={**os.environ, "BUDDY_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, json.loads((folder / "expected.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_plans_are_buddys_own(exports, name):
    folder, expected = exports
    planner = Planner.of_folder(folder / name)
    for answer in expected[name]:
        assert list(planner.plan(answer["budget"], answer["ids"]).blocks) == answer["blocks"]
    assert len({tuple(answer["blocks"]) for answer in expected[name]}) > 3


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_buddys_own(exports, name, tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    folder, expected = exports
    batch = [
        {"ids": answer["ids"], "budget": answer["budget"], "max_tokens": len(answer["tokens"])}
        for answer in expected[name]
    ]
    said = run_engine(folder / name, tmp_path, [batch])["batches"][0]
    assert [answer["tokens"] for answer in said] == [answer["tokens"] for answer in expected[name]]
    assert [answer["buddy"]["blocks"] for answer in said] == [
        len(answer["blocks"]) for answer in expected[name]
    ]
