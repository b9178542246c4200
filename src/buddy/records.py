"""RunRecord: what measurements write and plots read. JSON, written whole or not at all."""

import json
import os
import platform
import shlex
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import buddy
from buddy.errors import BuddyError, ResultError, shown
from buddy.files import read_json, write_text
from buddy.processes import launched
from buddy.provenance import own_commit

_PACKAGES: Final = ("torch", "transformers", "peft")
_INSTRUCTIONS: Final = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "avx_vnni"),
    *("asimd", "asimddp", "bf16", "i8mm"),
)
"""Those of a processor that decide how fast it multiplies matrices, as Linux names them."""


def command_line() -> str:
    """The command that is running, as it can be typed again."""
    program, *arguments = sys.argv
    is_ours = Path(program).name in ("buddy", "__main__.py")
    return shlex.join(["buddy", *arguments] if is_ours else ["python", program, *arguments])


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One measurement: what was run, on what, and what came out."""

    kind: str
    """What was measured, such as `routed-speed`."""
    config: dict[str, Any]
    """Everything that could have been set otherwise."""
    results: dict[str, Any]
    """The figures; units end their names."""
    model: dict[str, Any] | None
    """What `BuddyForCausalLM.facts` says: `num_blocks`, and the fingerprints of its weights. None
    where several models were measured: `config` or `results` name those."""
    command: str = field(default_factory=command_line)
    """The command that makes it again."""
    versions: dict[str, str] = field(default_factory=lambda: _versions())
    """Versions of Python and of the packages that matter."""
    machine: dict[str, Any] = field(default_factory=lambda: _machine())
    """Processor, its cores and the instructions that decide its speed, the system, and the
    processes that shared the work where there were several."""
    commit: str | None = field(default_factory=own_commit)
    """Commit of Buddy's source, with `-dirty` where it was changed; None where it is not known."""
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
    kinds = {"kind": str, "config": dict, "results": dict}
    if not isinstance(record, dict) or any(
        not isinstance(record.get(name), kind) for name, kind in kinds.items()
    ):
        raise ResultError(
            f"{path} is no RunRecord: expected kind (a text), config and results (objects) in it"
        )
    model = record.get("model")
    if model is not None and not _is_model(model):
        raise ResultError(
            f"{path}: model must be an object of num_blocks and fingerprints, got "
            f"{shown(model)}: make the record again"
        )
    return record


def _is_model(value: Any) -> bool:
    if not isinstance(value, dict) or "base" not in value:
        return False
    marks = [mark for name, mark in value.items() if name != "num_blocks"]
    return type(value.get("num_blocks")) is int and all(isinstance(mark, str) for mark in marks)


def check_model(
    record: dict[str, Any],
    where: str,
    *,
    num_blocks: int,
    fingerprint: str | None,
    error: type[BuddyError],
) -> None:
    """Refuse a record that was measured on another base model.

    Adapters and routers may differ: what was measured on a base model serves one that was tuned
    from it. A record of before fingerprints were kept names none, and passes.

    Args:
        record: As `read_record` gives it.
        where: What a message calls it.
        num_blocks: Of the model that it is to be used with.
        fingerprint: Of that model's base weights; None where they are not known.
        error: What is raised.

    Raises:
        BuddyError: Of the kind `error`.
    """
    model = record.get("model")
    if model is None:
        return
    if model["num_blocks"] != num_blocks:
        raise error(
            f"{where} was measured on a model of {model['num_blocks']} blocks and this one has "
            f"{num_blocks}: measure it on this model"
        )
    if fingerprint is not None and model["base"] != fingerprint:
        raise error(
            f"{where} was measured on another model: its base weights have the fingerprint "
            f"{model['base'][:12]}, this model's have {fingerprint[:12]}: measure it on this model"
        )


def _versions() -> dict[str, str]:
    # Buddy's is that of the source that runs, whatever other copy of it may be installed.
    own = {"python": platform.python_version(), "buddy-llm": buddy.__version__}
    return own | {package: metadata.version(package) for package in _PACKAGES}


def _machine() -> dict[str, Any]:
    facts = {"processor": processor(), "cores": os.cpu_count(), "system": platform.system()}
    has = set(" ".join((*_cpu_lines("flags"), *_cpu_lines("Features"))).split())
    facts |= {"instructions": " ".join(name for name in _INSTRUCTIONS if name in has)}
    return facts | ({} if launched().size == 1 else {"processes": launched().size})


def processor() -> str:
    """Its name, as the system gives it; empty where it does not."""
    return next(iter(_cpu_lines("model name")), "") or platform.processor()


def _cpu_lines(name: str) -> list[str]:
    """What the system says of each of its cores; nothing where it is not Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    pairs = (line.partition(":") for line in lines)
    return [value.strip() for key, _, value in pairs if key.strip() == name]
