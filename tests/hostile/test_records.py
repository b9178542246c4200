"""Whatever stands in a record, its readers give what it says or end in one line."""

import copy
import json
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buddy.depth.policy import PolicyResources
from buddy.errors import BuddyError, PolicyError, RecipeError, ResultError
from buddy.lab.evaluation.against import Against
from buddy.lab.evaluation.answers.answer_points import Answered
from buddy.lab.evaluation.perplexity import Windows
from buddy.lab.evaluation.rouge.rouge_points import Logged
from buddy.lab.evaluation.samples import SampleLog, read_samples
from buddy.lab.plots.figures import FIGURES, draw
from buddy.lab.plots.read.orders import read_context_ranks, read_importance, read_rank_series
from buddy.lab.plots.read.points import read_execution, read_points
from buddy.lab.plots.read.speed_cells import read_cells
from buddy.policies.registry import build_policy
from buddy.records import RunRecord, read_record
from buddy.resume import ResumeFile, fingerprint
from buddy.training.router.model import read_prior
from tests.lab.plots import made

BLOCKS = 6
BASE = "b" * 64
MODEL = {"num_blocks": BLOCKS, "base": BASE}
ORDER = [4, 1, 3, 2]
SETS = {"3": [0, 4, 5], "5": [0, 1, 2, 3, 5]}
IMPORTANCE = [9.0, 0.1, 0.4, 0.3, 0.0, 8.0]


def record(kind="importance-sleb", *, model=MODEL, **results):
    found = {"kind": kind, "config": {}, "results": results}
    return found if model is None else {**found, "model": model}


def resources(num_blocks=BLOCKS, fingerprint=BASE):
    return PolicyResources(num_blocks=num_blocks, fingerprint=fingerprint)


def read_static(path, of=None):
    return build_policy(f"static:{path}", of or resources())


def read_searched(path, of=None):
    return build_policy(f"searched:{path}", of or resources())


def read_as_prior(path, of=None):
    return read_prior(path, of or resources())


WHOLE = record(removal_order=ORDER, sets=SETS, importance=IMPORTANCE)
READERS = {"static": read_static, "searched": read_searched, "prior": read_as_prior}


def written(tmp_path, content):
    path = tmp_path / "record.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("name", READERS)
def test_a_record_of_this_model_is_read(tmp_path, name):
    assert READERS[name](written(tmp_path, WHOLE)) is not None
    adapted = {**WHOLE, "model": {**MODEL, "adapter": "a" * 64, "router": "c" * 64}}
    READERS[name](written(tmp_path, adapted))  # tuned from the same base model


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("model", "of", "says"),
    [
        (MODEL, resources(8), "a model of 6 blocks and this one has 8"),
        ({**MODEL, "num_blocks": 8}, resources(), "a model of 8 blocks and this one has 6"),
        (MODEL, resources(fingerprint="c" * 64), "fingerprint bbbbbbbbbbbb, this model's have cc"),
        (None, resources(8), "6 blocks|of 8 blocks"),
        (None, resources(4), "from 0 to 3|of 4 blocks"),
    ],
)
def test_a_record_of_another_model_is_refused(tmp_path, name, model, of, says):
    path = written(tmp_path, {**WHOLE, "model": model})
    with pytest.raises((PolicyError, RecipeError), match=says) as caught:
        READERS[name](path, of)
    assert "\n" not in str(caught.value)


def test_an_order_alone_tells_the_depth_of_its_model_where_it_names_every_block(tmp_path):
    path = written(tmp_path, record(model=None, removal_order=ORDER))
    assert read_static(path).removal_order == tuple(ORDER)
    with pytest.raises(PolicyError, match=r"orders blocks 1 to 4, so .* a model of 6 blocks"):
        read_static(path, resources(8))
    whole = written(tmp_path, record(model=None, removal_order=[*ORDER, 0, 5]))
    assert read_static(whole).removal_order[-1] == 5
    with pytest.raises(PolicyError, match="orders blocks 0 to 5"):
        read_static(whole, resources(8))
    some = written(tmp_path, record(model=None, removal_order=[4, 2]))
    assert read_static(some, resources(8)).removal_order == (4, 2)


NO_RECORD = [
    ("", "is no JSON"),
    ("[" * 100_000, "nests too deeply"),
    ("[]", "is no RunRecord"),
    ("{}", "is no RunRecord"),
    (json.dumps({"kind": 3, "config": {}, "results": {}}), "is no RunRecord"),
    (json.dumps({"kind": "x", "config": [], "results": {}}), "is no RunRecord"),
    (json.dumps({"kind": "x", "config": {}, "results": []}), "is no RunRecord"),
    (json.dumps({**WHOLE, "model": 3}), "model must be an object"),
    (json.dumps({**WHOLE, "model": {"num_blocks": True, "base": "b"}}), "model must be an object"),
    (json.dumps({**WHOLE, "model": {"num_blocks": 6, "base": 1}}), "model must be an object"),
    (json.dumps({**WHOLE, "model": {"num_blocks": 6}}), "model must be an object"),
    (json.dumps(record(importance=[float("nan")])), "NaN is not a finite number"),
]


@pytest.mark.parametrize(("content", "says"), NO_RECORD)
def test_what_is_no_record_is_one_line(tmp_path, content, says):
    path = written(tmp_path, content)
    for read in (read_record, *READERS.values()):
        with pytest.raises(ResultError, match=says) as caught:
            read(path)
        assert len(str(caught.value)) < 400
        assert "\n" not in str(caught.value)


LONG = list(range(200_000))
ORDERS = [
    (None, "no removal_order"),
    ("12", "the removal order must name blocks"),
    ([1, 1], "each once"),
    ([1, True], "the removal order must name blocks"),
    ([1, 2.0], "the removal order must name blocks"),
    ([-1], "from 0 to 5"),
    ([6], "from 0 to 5"),
    ([10**400], "from 0 to 5"),
    (LONG, "from 0 to 5"),
]


@pytest.mark.parametrize(("order", "says"), ORDERS)
def test_an_order_that_is_none_is_refused(tmp_path, order, says):
    path = written(tmp_path, record(removal_order=order, sets=SETS))
    for read in READERS.values():
        with pytest.raises((PolicyError, RecipeError), match=f"{says}|no sets and") as caught:
            read(path)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ([[0, 1]], "no sets"),
        ({}, "no sets"),
        ({"7": [0]}, "no sets .* of 6 blocks"),
        ({"03": [0, 4, 5]}, "no sets"),
        ({"9" * 5000: [0]}, "no sets"),
        ({"3": "045"}, "the set of 3 blocks must name"),
        ({"3": [0, True, 5]}, "the set of 3 blocks must name"),
        ({"3": [0, 5]}, "must name 3 blocks"),
        ({"3": LONG}, "from 0 to 5"),
    ],
)
def test_sets_that_are_none_are_refused(tmp_path, sets, says):
    path = written(tmp_path, record("searched", removal_order=ORDER, sets=sets))
    with pytest.raises(PolicyError, match=says) as caught:
        read_searched(path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("importance", "says"),
    [
        ("x", "no importance of 6 blocks"),
        ([1.0] * 7, "no importance of 6 blocks"),
        ([1.0] * 5 + ["1"], "importance must be numbers"),
        ([1.0] * 5 + [True], "importance must be numbers"),
        ([1.0] * 5 + [10**400], "importance must be numbers"),
        ([1.0] * 5 + [[1]], "importance must be numbers"),
    ],
)
def test_importance_that_is_none_is_refused(tmp_path, importance, says):
    path = written(tmp_path, record(importance=importance, removal_order=ORDER))
    with pytest.raises(RecipeError, match=f"router.prior: .*{says}"):
        read_as_prior(path)


ANYTHING = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 7, 10**400, 1e308, float("nan"), "", "$\\frac{", "\ud800", [], {}, LONG]
    ),
    st.integers(-2, 40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.recursive(st.integers(0, 9), lambda inner: st.lists(inner, max_size=3), max_leaves=5),
)


def places(value, at=()):
    """Where something can be put in the place of something."""
    if at:
        yield at
    keys = range(len(value)) if isinstance(value, list) else value
    for key in keys if isinstance(value, dict | list) else ():
        yield from places(value[key], (*at, key))


@st.composite
def altered(draw, valid):
    """A record with something else in one to three places, or nothing there."""
    chosen = draw(st.lists(st.sampled_from(list(places(valid))), min_size=1, max_size=3))
    value = copy.deepcopy(valid)
    for *path, last in chosen:
        with suppress(LookupError, TypeError):  # an earlier change took the place away
            inner = value
            for key in path:
                inner = inner[key]
            if draw(st.booleans()):
                del inner[last]
            else:
                inner[last] = draw(ANYTHING)
    return value


FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


def only_ours(act):
    """Run it; an error must be ours, and one line."""
    try:
        act()
    except BuddyError as error:
        said = str(error)
    else:
        return
    assert "\n" not in said
    assert len(said) < 1000


@FUZZ
@given(altered(WHOLE))
def test_of_any_order_sets_or_importance_only_our_errors_come_out(folder, found):
    path = written(folder, found)
    for read in READERS.values():
        only_ours(lambda read=read: read(path))


PLOTTED = {
    "points": (made.tasks_record(), lambda found: read_points(found, "accuracy")),
    "execution": (made.execution_record(), lambda found: read_execution(found, "heatmap")),
    "ranks": (made.ranks_record(8, 3), read_rank_series),
    "context": (made.context_record(8), read_context_ranks),
    "cells": (made.speed_record(), lambda found: read_cells(found, "speed")),
    "importance": (record("importance-sleb", removal_order=ORDER), read_importance),
}


@pytest.mark.parametrize("name", PLOTTED)
def test_of_any_plotted_record_only_our_errors_come_out(folder, name):
    valid, read = PLOTTED[name]

    @FUZZ
    @given(altered(valid))
    def check(found):
        path = written(folder, found)
        only_ours(lambda: read([read_record(path)]))

    assert read([valid])
    check()


@pytest.mark.parametrize(
    "value", [10**400, 2**60, 1e308, -1, 0, "7", None, [], True], ids=lambda value: repr(value)[:9]
)
@pytest.mark.parametrize("field", ["num_blocks", "blocks", "value", "stderr", "label"])
def test_a_figure_of_a_hostile_point_is_drawn_or_one_line(field, value):
    found = made.tasks_record()
    for point in found["results"]["points"]:
        point[field] = value
    only_ours(lambda: draw("accuracy", [found]))


RUN = {"model": MODEL, "seed": 1}
CONDITION = {"label": "a", "policy": "random", "blocks": 4, "num_blocks": 6, "key": "random@4"}
ANSWER = {"key": "random@4 x", "task": "t", "nll": 1.5, "tokens": 3, "blocks": [0, 1, 2, 5]}
LOG = [{"run": RUN}, {"condition": CONDITION}, ANSWER]


def log_of(folder, lines):
    path = folder / "log.samples.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@FUZZ
@given(altered(LOG))
def test_of_any_log_only_our_errors_come_out(folder, found):
    path = log_of(folder, found if isinstance(found, list) else [found])

    def go_on():
        with SampleLog(path, RUN) as log:
            for kind in (Answered, Windows, Logged):
                with suppress(ResultError):
                    log.find(ANSWER["key"], kind)

    def compare():
        for one in Against(path).conditions():
            one.rows(one.marks(), Answered)

    only_ours(lambda: read_samples(path))
    only_ours(compare)
    only_ours(go_on)


@given(st.binary(max_size=200))
@settings(FUZZ)
def test_of_any_bytes_as_a_log_only_our_errors_come_out(folder, content):
    path = folder / "bytes"
    path.write_bytes(content)
    only_ours(lambda: read_samples(path))


@pytest.mark.parametrize("identity", ["{", "[]", "3", '{"text": 1}', "[" * 5000])
def test_a_resume_file_that_says_nonsense_of_itself_is_one_line(tmp_path, identity):
    from safetensors.torch import save_file

    path = tmp_path / "partial"
    save_file({"done": torch.tensor(1)}, path, metadata={"identity": identity})
    file = ResumeFile(path, {"batch": 1, "text": fingerprint(torch.zeros(1, 2, dtype=torch.long))})
    with pytest.raises(ResultError) as caught:
        file.read({"done": torch.tensor(0)})
    assert "\n" not in str(caught.value)


def test_a_record_that_is_written_is_read(tmp_path):
    path = tmp_path / "own.json"
    RunRecord(kind="x", config={}, results={"removal_order": ORDER}, model=MODEL).save(path)
    assert read_static(path).removal_order == tuple(ORDER)
    assert read_record(path)["model"] == MODEL
    assert set(FIGURES) >= {"accuracy"}
