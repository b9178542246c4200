"""What a sample log keeps, and what it refuses."""

import dataclasses
import json
import subprocess
import sys

import pytest

from buddy.errors import ResultError
from buddy.lab.evaluation.samples import SampleLog, read_samples

RUN = {"model": {"base": "tiny"}, "seed": 1}


@dataclasses.dataclass(frozen=True)
class Score:
    score: float


def test_samples_come_back_after_a_restart(tmp_path):
    path = tmp_path / "run.samples.jsonl"
    with SampleLog(path, RUN) as log:
        assert log.find("a", Score) is None
        log.add("a", score=-1.25)
    with SampleLog(path, RUN) as log:
        assert log.find("a", Score) == Score(-1.25)
        log.add("b", score=0.1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("key") for line in lines] == [None, "a", "b"]


def test_a_line_cut_off_by_a_crash_is_dropped_and_the_next_is_whole(tmp_path):
    path = tmp_path / "log"
    with SampleLog(path, RUN) as log:
        log.add("a", score=1)
        log.add("b", score=2)
    path.write_text(path.read_text()[:-9])
    with SampleLog(path, RUN) as log:
        assert log.find("a", Score) is not None
        assert log.find("b", Score) is None
        log.add("b", score=2)
    with SampleLog(path, RUN) as log:
        assert log.find("b", Score) == Score(2.0)


def test_a_log_of_another_run_is_refused_and_kept(tmp_path):
    path = tmp_path / "log"
    with SampleLog(path, RUN) as log:
        log.add("a", score=1)
    before = path.read_bytes()
    with pytest.raises(ResultError, match=r"other seed \(was 1, is 2\): delete it") as caught:
        SampleLog(path, {**RUN, "seed": 2})
    assert "\n" not in str(caught.value)
    other = {"model": {"base": "tiny", "adapter": "a"}, "seed": 1}
    with pytest.raises(ResultError, match=r"other model\.adapter \(was not there, is 'a'\)"):
        SampleLog(path, other)
    assert path.read_bytes() == before


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "log"
    with SampleLog(path, RUN) as log:
        log.add("a", score=1)
        log.add("b", score=2)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:5], lines[2]]))
    with pytest.raises(ResultError, match="line 2"):
        SampleLog(path, RUN)


def test_a_flipped_bit_is_refused_or_costs_the_last_line_alone(tmp_path):
    path = tmp_path / "log"
    with SampleLog(path, RUN) as log:
        log.declare({"label": "x"})
        log.add("a", score=0.125)
        log.add("b", score=2)
    whole, content, said = read_samples(path), path.read_bytes(), []
    for bit in range(0, 8 * len(content), 7):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            found = read_samples(path)
        except ResultError as error:
            said.append(str(error))
            continue
        assert found.identity == whole.identity
        assert found.conditions == whole.conditions
        assert found.entries == {"a": whole.entries["a"]}
    assert len(said) > len(content)
    assert all(str(path) in line and len(line.splitlines()) == 1 for line in said)


def test_a_damaged_line_that_is_deleted_is_measured_again(tmp_path):
    path = tmp_path / "log"
    with SampleLog(path, RUN) as log:
        log.add("a", score=1)
        log.add("b", score=2)
    first, second, third = path.read_text().splitlines(keepends=True)
    path.write_text(first + second.replace('"score": 1', '"score": 3') + third)
    with pytest.raises(ResultError, match=r"line 2 \(delete the line, and it is measured again\)"):
        SampleLog(path, RUN)
    path.write_text(first + third)
    with SampleLog(path, RUN) as log:
        assert (log.find("a", Score), log.find("b", Score)) == (None, Score(2.0))


def test_a_log_of_before_is_read_without_checksums(tmp_path):
    path = tmp_path / "log"
    path.write_text(f'{{"run": {json.dumps(RUN)}}}\n{{"key": "a", "score": 1}}\n')
    with SampleLog(path, RUN) as log:
        assert log.find("a", Score) == Score(1.0)


def test_a_full_disk_is_an_error_that_keeps_earlier_samples(tmp_path):
    path = tmp_path / "log"
    # A limit on the size of files is what a full disk looks like to the writer.
    code = f"""
import resource, signal
from pathlib import Path
from buddy.errors import ResultError
from buddy.lab.evaluation.samples import SampleLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = SampleLog(Path({str(path)!r}), {RUN!r})
log.add("a", score=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
try:
    for number in range(100):
        log.add(str(number), score=1)
except ResultError as error:
    print(error)
else:
    raise SystemExit("nothing was refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "are kept" in done.stdout
    with SampleLog(path, RUN) as log:
        assert log.find("a", Score) == Score(1.0)
