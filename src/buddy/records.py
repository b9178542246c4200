"""RunRecord: what measurements write and plots read. JSON, written whole or not at all."""

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from buddy.errors import ResultError
from buddy.files import read_json, write_text

_PACKAGES = ("buddy-llm", "torch", "transformers", "peft")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One measurement: what was run, on what, and what came out."""

    kind: str
    """What was measured, such as `routed-speed`."""
    command: str
    """The command that makes it again."""
    config: dict[str, Any]
    """Everything that could have been set otherwise."""
    results: dict[str, Any]
    """The figures; units end their names."""
    versions: dict[str, str] = field(default_factory=lambda: _versions())
    """Of Python and of the packages that matter."""
    machine: dict[str, Any] = field(default_factory=lambda: _machine())
    """Processor and threads."""
    commit: str | None = field(default_factory=lambda: _commit())
    """Of the working tree, with `-dirty` where it was changed; None outside a checkout."""
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """UTC."""

    def save(self, path: Path) -> None:
        """Write JSON under a temporary name, then rename it.

        Raises:
            ResultError: It cannot be written; what was there before is intact.
        """
        try:
            text = json.dumps(asdict(self), indent=2, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ResultError(f"the record for {path} is not plain JSON: {error}") from error
        write_text(path, text + "\n")


def read_record(path: Path) -> dict[str, Any]:
    """Read a record's JSON.

    Raises:
        ResultError: It is missing, damaged, or no record.
    """
    record = read_json(path, ResultError)
    if not isinstance(record, dict) or not {"kind", "config", "results"} <= record.keys():
        raise ResultError(f"{path} is no RunRecord: expected kind, config and results in it")
    return record


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _machine() -> dict[str, Any]:
    return {"processor": _processor(), "cores": os.cpu_count(), "system": platform.system()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((ln.split(":", 1)[1].strip() for ln in lines if ln.startswith("model name")), "")


def _commit() -> str | None:
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # no git
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
