r"""Everything that Buddy does on a GPU, in one command: what works, how fast, in how much memory.

Each part is a process with a limit of time. Its output goes to a file, its result into the record,
also where it fails or its time is up; a part that has ended well is not run again. Parts that need
nothing but this tree use random weights in the shape of known models.

    python benchmarks/gpu_day.py --out runs/gpu-day
    python benchmarks/gpu_day.py --out runs/gpu-day --minutes 9 --only versions,tests,engines
    python benchmarks/gpu_day.py --out runs/rehearsal --rehearse
    python benchmarks/gpu_day.py --out runs/gpu-day --recipe recipes/smollm2-135m.toml

`--rehearse` runs all of it on a CPU with tiny sizes, so that no minute of a GPU is lost to a slip.
`--recipe` trains with what is left of `--minutes`, and goes on where an earlier call stopped.
`benchmarks/offline_pack.py` makes what a machine without a network needs.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from buddy.lab import experiment

HERE: Final = Path(__file__).parent
GRACE_S: Final = 10
"""A part whose time is up has so long to end by itself."""


@dataclass(frozen=True)
class Part:
    """Something to run.

    Attributes:
        name: Of its output, and in the record.
        limit_s: Seconds until it is stopped.
        command: What runs; `{out}` is a folder of its own.
        needs: A program without which it is left out.
    """

    name: str
    limit_s: int
    command: tuple[str, ...]
    needs: str | None = None


def parts(is_rehearsal):
    """All parts, in order: what others depend on first, and what says most."""
    device, small, large = ("cpu", "tiny", "tiny") if is_rehearsal else ("cuda", *_SIZES)
    tests = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
    graphs = (*tests, "tests/product/engine/test_graphs.py")
    sanitizer = ("compute-sanitizer", "--target-processes", "all", *graphs)
    return [
        Part("versions", 60, _own("versions", device)),
        Part("tests", 240, (*tests, "-n", "4")),
        Part("snippet", 120, _own("snippet", device)),
        Part("engines", 120, _own("engines", device, small)),
        Part("arenas", 120, _own("arenas", device, small)),
        Part("profile", 120, _own("profile", device, small)),
        Part("speed-small", 300, _speed(device, small, is_rehearsal)),
        Part("speed-8b", 480, _speed(device, large, is_rehearsal)),
        Part("serve", 180, _own("serve", device, small)),
        Part("importance", 240, _own("importance", device, large)),
        Part("train", 480, _own("train", device, large)),
        Part("qlora", 480, _own("qlora", device, large)),
        Part("sanitizer", 300, sanitizer, needs="compute-sanitizer"),
    ]


_SIZES: Final = ("smollm2-135m", "llama-3-8b")


def _own(name, device, size=None):
    sized = () if size is None else ("--size", size)
    script = str(HERE / "gpu_parts.py")
    return (sys.executable, script, name, "--device", device, *sized, "--out", "{out}/result.json")


def _speed(device, size, is_rehearsal):
    few = ("--rounds", "1", "--new-tokens", "4", "--shapes", "1x16,2x16")
    full = ("--rounds", "3", "--shapes", "1x256,8x256,1x4096")
    return (
        *(sys.executable, str(HERE / "engine.py"), "--random", size, "--device", device),
        *(few if is_rehearsal else full),
        *("--out", "{out}/result.json"),
    )


def run(part, folder, limit_s):
    """Run a part; how it ended."""
    own = folder / part.name
    own.mkdir(parents=True, exist_ok=True)
    command = [word.replace("{out}", str(own)) for word in part.command]
    if part.needs is not None and shutil.which(part.needs) is None:
        return {"ended": "left out", "why": f"no {part.needs} here"}
    begun = time.monotonic()
    with (own / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=_env()
        )
        ended = _waited(process, limit_s)
    lines = [line for line in (own / "output.txt").read_text().splitlines() if line.strip()]
    found = {
        "ended": ended,
        "seconds": round(time.monotonic() - begun, 1),
        "command": " ".join(part.command),
        "line": lines[-1][:500] if lines else "",
    }
    result = own / "result.json"
    if result.exists():
        found["result"] = json.loads(result.read_text())["results"]
    return found


def _waited(process, limit_s):
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _stop(process)
        return f"stopped after {limit_s:.0f} s"
    return "well" if code == 0 else f"with exit code {code}"


def _stop(process):
    """End a part and all that it has started."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _env():
    paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def train(recipe, folder, limit_s):
    """A recipe's run, from where it stands, until its time is up."""
    own = folder / "recipe"
    command = ["train", recipe, "--out", str(own / "run"), "--resume"]
    part = Part("recipe", limit_s, (sys.executable, "-m", "buddy", *command))
    return run(part, folder, limit_s)


def main():
    """Run what is left to run, and record each part as it ends."""
    parser = experiment.arguments(__doc__, out=False)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--only", default="", help="these parts alone, again; commas between")
    parser.add_argument("--minutes", type=float, default=30, help="for all parts together")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny sizes")
    parser.add_argument("--recipe", help="train by it in the time that is left")
    args = parser.parse_args()
    ends = time.monotonic() + 60 * args.minutes
    record = args.out / "gpu-day.json"
    results = json.loads(record.read_text())["results"] if record.exists() else {}
    every = parts(args.rehearse)
    only = list(filter(None, args.only.split(",")))
    unknown = set(only) - {part.name for part in every}
    if unknown:
        sys.exit(f"no part {min(unknown)!r}: expected {', '.join(part.name for part in every)}")

    def note(name, found):
        results[name] = found
        experiment.save(record, "gpu-day", results, config=args)
        print(f"{name:<12} {found['ended']:<20} {found.get('line', '')}"[:200], flush=True)

    for part in every:
        wanted = part.name in only if only else results.get(part.name, {}).get("ended") != "well"
        left_s = ends - time.monotonic() - GRACE_S
        if wanted and left_s > 0:
            note(part.name, run(part, args.out, min(part.limit_s, left_s)))
    left_s = ends - time.monotonic() - GRACE_S
    if args.recipe and left_s > 0:
        note("recipe", train(args.recipe, args.out, left_s))
    bad = [n for n, found in results.items() if found["ended"] not in ("well", "left out")]
    sys.exit(f"did not end well: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    experiment.run(main)
