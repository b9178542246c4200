"""What keeps an interrupted work: damaged, forged or in the wrong place, one line refuses it."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from buddy.backbone.backbone import Backbone
from buddy.errors import BuddyError, ResultError, TrainingError
from buddy.files import new_folder, write_text
from buddy.hub.folder import exclusive
from buddy.importance.indicators.indicator import build_indicator
from buddy.importance.indicators.measure import measure
from buddy.importance.search.sleb import sleb_search
from buddy.lab.search.passages import Passages
from buddy.lab.search.searched import swap_search
from buddy.resume import ResumeFile
from buddy.training.log import TrainingLog
from buddy.training.state import LOCK, STATE, claimed_folder, load_state, save_state
from tests.hostile.folders import SHAPES_BEYOND_TORCH, forge_shape
from tests.tiny import tiny_model

STEPS = 6
IDENTITY = {"seed": 3, "data": {"path": "rows.jsonl"}}
IDS = torch.randint(4, 90, (6, 8), generator=torch.Generator().manual_seed(0))


class Stopped(Exception):
    """Ends a measurement in the middle."""


def state(seed=0):
    """Parameters and an optimiser that has taken a step."""
    draw = torch.Generator().manual_seed(seed)
    parameters = {name: torch.randn(3, 4, generator=draw).requires_grad_() for name in ("a", "b.c")}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    sum(p.square().sum() for p in parameters.values()).backward()
    optimizer.step()
    return {"parameters": parameters, "optimizer": optimizer}


def save(path, step=3, extra=None, **changed):
    save_state(path, identity=IDENTITY, step=step, extra=extra or {}, **{**state(), **changed})


def load(path, into=None, restore=lambda done, carried: None):
    into = state(1) if into is None else into
    return load_state(path, identity=IDENTITY, steps=STEPS, restore=restore, **into)


def refused(call, error=BuddyError):
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def flipped(content, bit):
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def bits_of(content):
    """All bits of the header's length, and some of the rest, header and data."""
    draw = random.Random(0)
    header = 8 + int.from_bytes(content[:8], "little")
    return [
        *range(64),
        *(draw.randrange(64, 8 * header) for _ in range(150)),
        *(draw.randrange(8 * header, 8 * len(content)) for _ in range(60)),
    ]


def test_a_flipped_bit_anywhere_in_a_training_state_is_refused_and_changes_nothing(tmp_path):
    path = tmp_path / STATE
    save(path)
    content, into = path.read_bytes(), state(1)
    before = [parameter.detach().clone() for parameter in into["parameters"].values()]
    for bit in bits_of(content):
        path.write_bytes(flipped(content, bit))
        said = refused(lambda: load(path, into), TrainingError)
        assert str(path) in said, bit
    after = into["parameters"].values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    path.write_bytes(content)
    assert load(path, into) == 3
    for got, wanted in zip(after, state()["parameters"].values(), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("length", [0, 1, 8, 9, 100, -1])
def test_a_state_that_was_cut_short_is_refused(tmp_path, length):
    save(tmp_path / STATE)
    content = (tmp_path / STATE).read_bytes()
    (tmp_path / STATE).write_bytes(content[:length])
    assert "is damaged" in refused(lambda: load(tmp_path / STATE), TrainingError)


@pytest.mark.parametrize(
    "shape", [(1,), (), (3, 1), (1, 4), (4, 3), (12,), (3, 4, 1), (0,), (3, 5)]
)
@pytest.mark.parametrize("name", ["parameter.a", "optimizer.a:exp_avg", "optimizer.b.c:step"])
def test_a_tensor_of_another_shape_is_refused(tmp_path, name, shape):
    path = tmp_path / STATE
    save(path)
    tensors = load_file(path)
    if tensors[name].shape == shape:
        shape = (2,)
    tensors[name] = torch.zeros(shape)
    ResumeFile(path, IDENTITY).write(tensors, step=3, extra={})
    assert f"expected {name} to be" in refused(lambda: load(path), TrainingError)


@pytest.mark.parametrize("shape", SHAPES_BEYOND_TORCH)
def test_a_shape_beyond_torch_is_refused(tmp_path, shape):
    save(tmp_path / STATE)
    forge_shape(tmp_path / STATE, "parameter.a", shape)
    assert "is damaged" in refused(lambda: load(tmp_path / STATE), TrainingError)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_of_another_dtype_is_refused(tmp_path, dtype):
    path = tmp_path / STATE
    save(path)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    ResumeFile(path, IDENTITY).write(tensors, step=3, extra={})
    assert "is damaged (expected " in refused(lambda: load(path), TrainingError)


@pytest.mark.parametrize("step", [10**9, STEPS + 1, -1, True, None, 3.0, "3", [3], {}])
def test_a_state_of_more_steps_than_the_run_has_is_refused(tmp_path, step):
    path = tmp_path / STATE
    save(path)
    ResumeFile(path, IDENTITY).write(load_file(path), step=step, extra={})
    assert f"of {STEPS} are done" in refused(lambda: load(path), TrainingError)


@pytest.mark.parametrize("name", ["parameter.a", "optimizer.a:exp_avg", "optimizer.b.c:step"])
def test_a_state_without_a_tensor_or_with_another_is_refused(tmp_path, name):
    path = tmp_path / STATE
    save(path)
    tensors = load_file(path)
    whole = dict(tensors)
    del tensors[name]
    ResumeFile(path, IDENTITY).write(tensors, step=3, extra={})
    assert "it lacks" in refused(lambda: load(path), TrainingError)
    ResumeFile(path, IDENTITY).write({**whole, f"{name}x": torch.zeros(1)}, step=3, extra={})
    assert "it has an unknown" in refused(lambda: load(path), TrainingError)


@pytest.mark.parametrize("values", [{}, {"step": 3}, {"step": 3, "extra": None}, {"extra": {}}])
def test_what_a_state_carries_is_there(tmp_path, values):
    path = tmp_path / STATE
    save(path)
    ResumeFile(path, IDENTITY).write(load_file(path), **values)

    def restore(done, carried):
        return float(carried["seconds"]) + done

    assert "is damaged" in refused(lambda: load(path, restore=restore), TrainingError)


def test_a_state_of_before_is_read_without_a_checksum(tmp_path):
    path = tmp_path / STATE
    save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, {"buddy": metadata["buddy"]})
    assert load(path) == 3
    save_file(load_file(path), path, {"xxh3_128": metadata["xxh3_128"]})
    assert "is damaged" in refused(lambda: load(path), TrainingError)
    save_file(load_file(path), path, {"buddy": metadata["buddy"], "xxh3_129": "0"})
    assert "is damaged" in refused(lambda: load(path), TrainingError)


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: path.touch(0)],
)
def test_a_state_that_is_no_file_is_refused_at_once(tmp_path, make):
    make(tmp_path / STATE)
    if os.access(tmp_path / STATE, os.R_OK) and (tmp_path / STATE).is_file():
        pytest.skip("a superuser may read anything")
    assert "cannot be read" in refused(lambda: load(tmp_path / STATE), TrainingError)


def test_a_log_that_is_a_pipe_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "log.jsonl")
    log = TrainingLog(tmp_path, 0, tensorboard=False)
    log.write(1, "train", loss=2.0)
    log.close()
    assert json.loads((tmp_path / "log.jsonl").read_text())["loss"] == 2.0


def stopped(work, path):
    """Interrupt some work in its second batch, and what its file has then."""

    def stop(done, *_):
        if done:
            raise Stopped

    with pytest.raises(Stopped):
        work(path, stop)
    return path.read_bytes()


def indicator(name):
    def work(path, hook):
        made = build_indicator(name, Backbone(tiny_model()))
        after_a_write = lambda done, total: hook(done >= 4)  # noqa: E731
        return measure(made, IDS, batch=2, resume=path, on_batch=after_a_write)

    return work


def sleb(path, hook):
    return sleb_search(Backbone(tiny_model()), IDS, 2, resume=path, batch=2, on_round=hook)


def sets(path, hook):
    text, model = Passages(IDS), Backbone(tiny_model())
    return swap_search(model, text, [3, 2, 1, 4], [4], resume=path, batch=2, on_try=hook)


WORK = {
    **{name: indicator(name) for name in ("delta-ppl", "taylor", "cosine")},
    "sleb": sleb,
    "sets": sets,
}


@pytest.mark.parametrize("name", WORK)
def test_a_flipped_bit_in_what_a_measurement_or_search_kept_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr("buddy.resume.SAVE_EVERY_S", -1.0)
    path, work = tmp_path / "partial", WORK[name]
    content = stopped(work, path)
    for bit in random.Random(1).sample(bits_of(content), 8):
        path.write_bytes(flipped(content, bit))
        assert str(path) in refused(lambda: work(path, lambda *_: None), ResultError)
    tensors = load_file(path) if path.write_bytes(content) else {}
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["buddy"])
    for tensor in [*tensors][:2]:  # forged
        ResumeFile(path, about["identity"]).write({**tensors, tensor: torch.zeros(2, 1)})
        assert "is damaged" in refused(lambda: work(path, lambda *_: None), ResultError)
    path.write_bytes(content)
    work(path, lambda *_: None)


def test_a_lock_falls_with_the_process_that_held_it(tmp_path):
    held = FileLock(tmp_path / LOCK)
    code = (
        "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); "
        "print(flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / LOCK)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        other.stdout.readline()
        with pytest.raises(TrainingError, match="another run"), claimed_folder(tmp_path, held):
            pass
        other.kill()
    with claimed_folder(tmp_path, held):
        pass


def test_a_file_system_without_locks_is_said_and_stops_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("BUDDY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(FileLock, "acquire", Mock(side_effect=NotImplementedError))
    with claimed_folder(tmp_path, FileLock(tmp_path / LOCK)):
        pass
    assert "without locks" in caplog.text
    with exclusive("tiny", Mock()) as staging:
        assert staging.is_dir()


def age(path):
    os.utime(path, (time.time() - 3600,) * 2)


@pytest.mark.parametrize("write", [lambda path: write_text(path, "new"), "state", "folder"])
def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path, write):
    path, hex32 = tmp_path / "x[1]", "0123456789abcdef" * 2
    left = tmp_path / f".{path.name}.{hex32}"
    left.mkdir()
    (left / "new").write_text("half")
    age(left)
    file = tmp_path / f".{path.name}.{hex32[::-1]}"  # as earlier versions wrote
    file.write_text("half")
    age(file)
    other = tmp_path / f".y.{hex32}"
    other.write_text("of another file")
    age(other)
    if write == "folder":
        with new_folder(path) as staging:
            (staging / "file").write_text("new")
    elif write == "state":
        save(path)
    else:
        write(path)
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


def test_what_a_live_writer_has_stays(tmp_path):
    with new_folder(tmp_path / "x") as staging:
        age(staging.parent)
        with new_folder(tmp_path / "x") as second:
            (second / "file").write_text("second")
        assert staging.is_dir()
        (staging / "file").write_text("first")
    assert (tmp_path / "x" / "file").read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_a_killed_writer_had_moved_away_comes_back(tmp_path):
    left = tmp_path / f".x.{'0' * 32}"
    (left / "old").mkdir(parents=True)
    (left / "old" / "file").write_text("old")
    age(left)
    with pytest.raises(Stopped), new_folder(tmp_path / "x"):
        raise Stopped
    assert (tmp_path / "x" / "file").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
