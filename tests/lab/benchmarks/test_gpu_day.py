"""The GPU day, rehearsed: its parts on a pretended device, and what a part that fails leaves."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from buddy.engine.executors import graphs
from tests.pretend import PretendDevice, move
from tests.product.engine.test_host_waits import at_once

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    """The scripts as modules."""
    names = ("gpu_day", "gpu_parts", "offline_pack")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))  # as `python benchmarks/NAME.py` does
        import gpu_day
        import gpu_parts
        import offline_pack

        yield gpu_day, gpu_parts, offline_pack
        for name in names:
            del sys.modules[name]


def spoken(*code):
    return (sys.executable, "-c", "; ".join(code))


def test_each_part_of_a_day_is_a_command_that_its_script_understands(scripts):
    gpu_day, gpu_parts, _ = scripts
    for is_rehearsal in (False, True):
        parts = gpu_day.parts(is_rehearsal)
        assert len({part.name for part in parts}) == len(parts)
        own = [part.command for part in parts if str(FOLDER / "gpu_parts.py") in part.command]
        assert {command[2] for command in own} == set(gpu_parts.PARTS)
        device = "cpu" if is_rehearsal else "cuda"
        assert all(command[command.index("--device") + 1] == device for command in own)
        sizes = {c[c.index("--size") + 1] for c in own if "--size" in c}
        assert sizes <= set(gpu_parts.SHAPES)


def test_a_part_that_fails_is_recorded_and_the_next_one_runs(scripts, tmp_path, monkeypatch):
    gpu_day, *_ = scripts
    count = tmp_path / "count"
    parts = [
        gpu_day.Part("good", 60, spoken(f"open({str(count)!r}, 'a').write('x')", "print('fine')")),
        gpu_day.Part("bad", 60, spoken("print('before')", "raise SystemExit(3)")),
        gpu_day.Part("absent", 60, spoken("pass"), needs="a-program-that-nobody-has"),
    ]
    monkeypatch.setattr(gpu_day, "parts", lambda is_rehearsal: parts)
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--out", str(tmp_path / "day")])
    for _ in range(2):
        with pytest.raises(SystemExit, match="did not end well: bad"):
            gpu_day.main()
    found = json.loads((tmp_path / "day" / "gpu-day.json").read_text())["results"]
    assert {name: part["ended"] for name, part in found.items()} == {
        "good": "well",
        "bad": "with exit code 3",
        "absent": "left out",
    }
    assert found["good"]["line"] == "fine"
    assert found["bad"]["line"] == "before"
    assert count.read_text() == "x", "what has ended well is not run again"


def test_a_part_is_stopped_with_all_that_it_has_started(scripts, tmp_path):
    gpu_day, *_ = scripts
    child = (
        f"subprocess.Popen(['sleep', '60']); open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))"
    )
    code = spoken("import subprocess, time", f"p = {child}", "time.sleep(60)")
    found = gpu_day.run(gpu_day.Part("long", 2, code), tmp_path, 2)
    assert found["ended"] == "stopped after 2 s"
    assert found["seconds"] < 30
    state = Path("/proc", (tmp_path / "pid").read_text(), "stat")

    def is_over():
        try:
            return state.read_text().split()[2] in "ZX"
        except OSError:
            return True

    until = time.monotonic() + 20  # a signal takes its time on a busy machine
    while not is_over() and time.monotonic() < until:
        time.sleep(0.05)
    assert is_over()


@pytest.fixture
def pretended(scripts, monkeypatch):
    """The parts' module, whose models are on a pretended device."""
    _, gpu_parts, _ = scripts
    plain = gpu_parts.random_model
    monkeypatch.setattr(graphs, "capture_cuda", lambda device, pool, work: at_once(work))
    monkeypatch.setattr("torch.cuda.graph_pool_handle", object)
    monkeypatch.setattr(gpu_parts, "random_model", lambda size, device: move(plain(size, "cpu")))
    return gpu_parts


@pytest.mark.parametrize("name", ["engines", "arenas", "profile", "importance"])
def test_a_part_runs_on_a_pretended_device(name, pretended, tmp_path):
    torch.manual_seed(0)
    fewer = {"engines": {"new_tokens": 3}, "arenas": {"joins": 8}, "profile": {"steps": 2}}
    settings = fewer.get(name, {})
    with PretendDevice():
        found = pretended.PARTS[name]("cuda", "tiny", tmp_path, **settings)
    json.dumps(found)
    if name == "engines":
        assert all(cell["same_tokens"] == 1.0 for cell in found["budgets"].values())


def test_a_pack_is_put_together_again(scripts, tmp_path):
    *_, offline_pack = scripts
    data = os.urandom(25_000)
    (tmp_path / "model.gguf").write_bytes(data)
    pack = tmp_path / "pack"
    (pack / "all").mkdir(parents=True)
    files = list(offline_pack.pieces(tmp_path / "model.gguf", 10_000, pack / "all"))
    assert len(files) == 4
    assert offline_pack.spread(files, pack, 15_000) >= 2
    join = [sys.executable, str(pack / "1" / "join.py"), str(pack)]
    subprocess.run(join, check=True, capture_output=True)
    assert (pack / "model.gguf").read_bytes() == data
    next(pack.glob("*/model.gguf.piece001")).unlink()
    done = subprocess.run(join, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "model.gguf: a piece is missing or damaged" in done.stderr


def test_what_a_pack_holds_is_what_buddy_needs(scripts):
    *_, offline_pack = scripts
    found = offline_pack.needed({"serve"}, {"pytest"}, {"torch"})
    assert {"transformers", "peft", "fastapi", "pytest", "tokenizers"} <= set(found)
    assert "torch" not in found
    assert "mkdocs" not in found
