"""Measurements that two processes share: those of one, however they are stopped and go on."""

import json
import signal
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from typer.testing import CliRunner

from buddy.backbone.backbone import Backbone
from buddy.cli.main import app
from buddy.importance.indicators.indicator import INDICATORS, build_indicator
from buddy.importance.indicators.measure import measure
from buddy.importance.indicators.skipping import DeltaPerplexity
from buddy.importance.search.bounded import Pruning
from buddy.importance.search.sleb import sleb_search
from buddy.processes import ALONE, joined, launched
from tests.product.cli.launched import call_two, run_two
from tests.tiny import random_ids, tiny_model
from tests.words import say, word_tokenizer

IDS = random_ids(7, 9)
"""Four batches of two, the last of one: two rounds of two processes."""


def compare(folder):
    """In each process: what it finds with the other one is what it finds alone."""
    backbone, ran = Backbone(tiny_model()), []
    with joined():
        ranks = launched()
        assert ranks.size == 2
        for name in INDICATORS:
            indicator = build_indicator(name, backbone)
            update = indicator.update
            indicator.update = lambda ids, update=update: (ran.append(len(ids)), update(ids))
            shared = measure(indicator, IDS, batch=2, ranks=ranks)
            alone = measure(build_indicator(name, backbone), IDS, batch=2)
            # Sums over batches: float64, of gradients float32.
            assert_close(shared, alone, rtol=1e-6, atol=1e-12)
        assert ran == [2, [2, 1][ranks.rank]] * len(INDICATORS)
        for pruning in (None, Pruning(bound_tokens=20)):
            shared = sleb_search(backbone, IDS, 3, batch=2, pruning=pruning, ranks=ranks)
            assert shared == sleb_search(backbone, IDS, 3, batch=2, pruning=pruning)
        resume(backbone, ranks, Path(folder))


def resume(backbone, ranks, folder):
    """A search that one process left within a round is ended by two, and the reverse."""
    expected = sleb_search(backbone, IDS, 3, batch=2)
    for first, second in ((ALONE, ranks), (ranks, ALONE)):
        # Two stop where both have ended a round: each would wait for the other for ever.
        place, after = ("on_candidate", 13) if first.size == 1 else ("on_round", 1)
        file, seen = folder / f"begun-by-{first.size}", []

        def search(by, file=file, **options):
            if by.size > 1 or ranks.is_writer:
                return sleb_search(backbone, IDS, 3, batch=2, resume=file, ranks=by, **options)
            if options:
                raise KeyboardInterrupt
            return expected

        def stop(*news, seen=seen, after=after):
            seen.append(news)
            if len(seen) == after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            search(first, **{place: stop})
        ranks.exchange(None)
        assert file.exists()
        assert search(second) == expected
        ranks.exchange(None)


def test_two_processes_find_what_one_finds(tmp_path):
    call_two(f"{__name__}:compare", tmp_path, str(tmp_path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    (path / "words.txt").write_text(say(*random_ids(1, 300)[0].tolist()))
    return path


def command(folder, out, *more):
    about = ["--text", str(folder / "words.txt"), "--tokens", "9", "--windows", "8", "--batch", "1"]
    return ["importance", str(folder), "--indicator", "delta-ppl", *about, "--out", str(out), *more]


# In the second process, the third batch of its own is not measured.
FAILS = """
from buddy.importance.indicators import skipping
from buddy.errors import ResultError
import buddy.resume, os, signal
buddy.resume.SAVE_EVERY_S = -1
whole, seen = skipping.DeltaPerplexity.update, []
def update(self, ids):
    seen.append(ids)
    if child == 0 and len(seen) == 3:
        {failure}
    whole(self, ids)
skipping.DeltaPerplexity.update = update
"""


@pytest.mark.parametrize(
    ("failure", "says", "codes"),
    [
        ("raise ResultError('no such luck')", "buddy: no such luck\n", (2, 2)),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "buddy: another process of this launch has ended without a word",
            (2, -signal.SIGKILL),
        ),
    ],
)
def test_a_failure_of_one_ends_both_with_one_line_and_the_command_goes_on(
    folder, tmp_path, monkeypatch, failure, says, codes
):
    out = tmp_path / "order.json"
    done, other = run_two(command(folder, out), tmp_path, before=FAILS.format(failure=failure))
    assert done.stdout == ""
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1
    assert (done.returncode, other) == codes
    assert not out.exists()
    assert out.with_name(f".{out.name}.partial").exists()
    # Two rounds of two are kept: one process measures four of the eight windows.
    measured, update = [], DeltaPerplexity.update
    with monkeypatch.context() as patch:
        patch.setattr(
            DeltaPerplexity, "update", lambda self, ids: (measured.append(ids), update(self, ids))
        )
        assert CliRunner().invoke(app, command(folder, out)).exit_code == 0
    assert len(measured) == 4
    alone = tmp_path / "alone.json"
    CliRunner().invoke(app, command(folder, alone), catch_exceptions=False)
    found, expected = (json.loads(path.read_text())["results"] for path in (out, alone))
    assert found["removal_order"] == expected["removal_order"]
    assert_close(torch.tensor(found["importance"]), torch.tensor(expected["importance"]))


def test_one_of_two_writes_and_prints(folder, tmp_path):
    out = tmp_path / "order.json"
    done, other = run_two(command(folder, out, "--indicator", "sleb"), tmp_path)
    assert (done.returncode, other) == (0, 0), done.stderr
    assert done.stdout == f"{out}\n"
    assert done.stderr.count("least important first") == 1
    record = json.loads(out.read_text())
    assert record["machine"]["processes"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["order.json", "other.json"]
