"""The cost of a step: what is fitted predicts, whatever disturbed the measurement."""

import itertools
import json
import logging
from dataclasses import asdict
from random import Random

import numpy as np
import pytest
import torch

from buddy.errors import ResultError
from buddy.serving.control.cost import (
    NUM_COEFFICIENTS,
    Correction,
    CostModel,
    features,
    fit,
    non_negative,
)
from buddy.serving.control.protocol import StepReport, StepShape
from buddy.serving.rows import calibrate
from buddy.serving.rows.calibrate import Bench, Sample, cost_of, measure, samples
from tests.product.serving.simulated import true_seconds
from tests.tiny import NUM_BLOCKS, tiny_buddy


def grid():
    return [
        StepShape.of_rows([depth] * rows, [context] * rows, prompt_lanes=p, prompt_depth=depth)
        for rows in (0, 1, 2, 4, 8, 16, 32)
        for depth in (8, 15, 30)
        for context in (16, 400)
        for p in (0, 16, 64, 256)
        if rows or p
    ]


def unseen(rng):
    rows = rng.randrange(1, 33)
    depths = [rng.randrange(8, 31) for _ in range(rows)]
    contexts = [rng.randrange(10, 500) for _ in range(rows)]
    prompt = rng.choice((0, 0, 40, 200))
    return StepShape.of_rows(depths, contexts, prompt_lanes=prompt, prompt_depth=max(depths))


def test_it_predicts_steps_that_it_was_not_fitted_on():
    cost, rng = fit(grid(), [true_seconds(shape) for shape in grid()]), Random(0)
    errors = [
        abs(cost.predict(shape) / true_seconds(shape) - 1) for shape in map(unseen, [rng] * 300)
    ]
    assert np.median(errors) < 0.03
    assert np.quantile(errors, 0.95) < 0.1


def test_prompts_that_the_kernel_takes_cost_what_answers_do():
    def seconds(shape):
        if shape.rows + shape.prompt_lanes > 40:  # torch runs it, and does much else first
            return true_seconds(shape) + 0.04
        lanes = (shape.row_blocks + shape.prompt_blocks) / shape.union
        return 2e-3 + 1e-4 * shape.rows + shape.union * (2e-4 + 2e-5 * lanes)

    shapes = [
        StepShape.of_rows([depth] * rows, [1] * rows, prompt_lanes=p, prompt_depth=depth)
        for rows in (0, 1, 2, 4, 8, 16, 32)
        for depth in (8, 15, 30)
        for p in (0, 8, 16, 24, 64, 256)
        if rows or p
    ]
    taken = [seconds(shape) for shape in shapes]

    def errors(plain):
        cost = fit(shapes, taken, plain)
        pairs = zip(shapes, taken, strict=True)
        return np.array(
            [abs(cost.predict(shape) / seconds_taken - 1) for shape, seconds_taken in pairs]
        )

    assert np.quantile(errors(40), 0.9) < 0.05
    assert np.quantile(errors(0), 0.9) > 0.3
    few = [features(shape, 40) for shape in shapes if shape.prompt_lanes == 8]
    assert not any(any(found[10:]) for found in few)


def test_steps_that_were_disturbed_hardly_count():
    rng = Random(1)
    seconds = [true_seconds(shape) * rng.lognormvariate(0, 0.03) for shape in grid()]
    disturbed = [s * (5 if rng.random() < 0.1 else 1) for s in seconds]
    clean, robust = fit(grid(), seconds), fit(grid(), disturbed)
    shapes = [unseen(rng) for _ in range(300)]
    errors = [abs(robust.predict(shape) / clean.predict(shape) - 1) for shape in shapes]
    assert np.median(errors) < 0.05
    assert np.quantile(errors, 0.95) < 0.15


def test_more_work_never_costs_less():
    rng = Random(2)
    cost = fit(grid(), [rng.uniform(0.5, 2) * true_seconds(shape) for shape in grid()])
    for _ in range(200):
        depths = [rng.randrange(3, 30) for _ in range(rng.randrange(1, 20))]
        contexts = [rng.randrange(300) for _ in depths]
        less = cost.predict(StepShape.of_rows(depths, contexts))
        cap = max(depths)
        deeper = cost.predict(StepShape.of_rows([cap] * len(depths), contexts))
        longer = cost.predict(StepShape.of_rows(depths, [context + 50 for context in contexts]))
        prompt = StepShape.of_rows(depths, contexts, prompt_lanes=9, prompt_depth=cap)
        assert less <= deeper + 1e-12
        assert less <= longer + 1e-12
        assert less <= cost.predict(prompt) + 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_least_squares_above_zero_is_what_trying_every_support_finds(seed):
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(9, 5)), rng.normal(size=9)
    best = float(target @ target)
    for size in range(1, 6):
        for chosen in itertools.combinations(range(5), size):
            part = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            if (part >= 0).all():
                rest = target - matrix[:, chosen] @ part
                best = min(best, float(rest @ rest))
    found = non_negative(matrix, target)
    assert (found >= 0).all()
    rest = target - matrix @ found
    assert float(rest @ rest) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_a_report_and_its_rows_have_the_same_shape():
    shape = StepShape.of_rows([30, 12], [100, 7], prompt_lanes=16, prompt_depth=20)
    report = StepReport(
        rows=2,
        union=30,
        row_blocks=42,
        block_context=30 * 100 + 12 * 7,
        prompt_lanes=16,
        prompt_blocks=320,
        seconds=0.1,
    )
    assert asdict(shape).items() <= asdict(report).items()
    assert features(report) == features(shape)
    assert features(shape)[1:3] == [2.0, 30.0]


def test_the_correction_follows_the_machine_and_no_single_step():
    correction = Correction()
    for _ in range(60):
        correction.update(0.03, 0.02)
    assert correction.factor == pytest.approx(1.5, rel=0.02)
    correction.update(3.0, 0.02)
    assert correction.factor < 1.6
    for _ in range(60):
        correction.update(0.02, 0.02)
    assert correction.factor == pytest.approx(1.0, rel=0.02)
    correction.update(0.0, 0.02)
    for _ in range(500):
        correction.update(1e9, 1.0)
    assert correction.factor == pytest.approx(8.0)


@pytest.mark.parametrize(
    "numbers",
    [(1.0,), *((value,) * NUM_COEFFICIENTS for value in (0.0, -1.0, float("nan")))],
)
def test_what_is_no_cost_model_is_refused(numbers):
    with pytest.raises(ResultError, match="measure it anew"):
        CostModel(numbers)


def test_no_steps_or_no_time_are_refused():
    with pytest.raises(ResultError, match="measure them again"):
        fit([], [])
    with pytest.raises(ResultError, match="measure them again"):
        fit([StepShape(rows=1)], [0.0])


def test_what_a_step_is_said_to_be_is_what_runs(monkeypatch):
    model = tiny_buddy()
    bench, seen = Bench(model, 3), []
    run = calibrate.run_step

    def watched(*args, **kwargs):
        out = run(*args, **kwargs)
        seen.append(out)
        return out

    monkeypatch.setattr(calibrate, "run_step", watched)
    for sample in (
        Sample(depths=(NUM_BLOCKS, 4, 3), context=9),
        Sample(depths=(4, 4), context=20),
        Sample(prompt=12, prompt_depth=4),
        Sample(depths=(5, 3), context=4, prompt=7, prompt_depth=4),
    ):
        assert bench.run(sample) > 0
        out, shape = seen[-1], sample.shape
        runs = out.plan.host
        rows = len(sample.depths)
        assert shape.rows == rows
        assert runs[:rows].sum() == shape.row_blocks
        assert runs[rows:].sum() == shape.prompt_blocks
        assert len(runs) - rows == shape.prompt_lanes
        assert runs.any(0).sum() == shape.union
        assert shape.block_context == sum(sample.depths) * (sample.context + 1)
        assert out.lanes.starts[:rows] == (sample.context,) * rows
        assert out.engine == model.executor.name or sample.prompt


def test_the_first_steps_that_are_measured_tell_all_terms_apart():
    first = next(samples(30, 32, 512, 1000.0))
    matrix = np.array([features(sample.shape) for sample in first])
    assert set(np.flatnonzero(matrix.any(0))) == set(range(NUM_COEFFICIENTS)) - {8}
    corners = np.array([features(sample.shape) for sample in first[:7]])
    assert np.linalg.matrix_rank(corners) == 7


def test_a_measurement_ends_in_time():
    now = itertools.count()
    shapes, seconds = measure(tiny_buddy(), 4, seconds=40.0, clock=lambda: float(next(now)))
    assert 7 <= len(shapes) == len(seconds) < 20


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "cache_home", lambda: tmp_path)
    return tmp_path / "costs"


def test_it_is_measured_once_for_a_model_and_a_machine(home, monkeypatch):
    model, now = tiny_buddy(), itertools.count()
    made = cost_of(model, 2, seconds=40.0, clock=lambda: float(next(now)))
    (path,) = home.iterdir()
    monkeypatch.setattr(calibrate, "measure", lambda *_, **__: pytest.fail("measured again"))
    assert cost_of(model, 2, clock=lambda: float(next(now))) == made
    assert json.loads(path.read_text())["identity"]["threads"] == torch.get_num_threads()


@pytest.mark.parametrize("times", [0.3, 3.0])
def test_a_fit_of_an_hour_that_is_past_is_measured_anew(home, caplog, times):
    model, now = tiny_buddy(), itertools.count()
    made = cost_of(model, 2, seconds=40.0, clock=lambda: float(next(now)))
    with caplog.at_level(logging.WARNING, "buddy"):
        again = cost_of(model, 2, seconds=40.0, clock=lambda: times * next(now))
    assert "times as long now" in caplog.text
    shape = Sample(depths=(NUM_BLOCKS,)).shape
    assert again.predict(shape) == pytest.approx(times * made.predict(shape), rel=0.05)


def test_another_model_number_of_rows_or_threads_is_measured_apart(home):
    cost_of(tiny_buddy(), 2, seconds=0.2)
    cost_of(tiny_buddy(), 3, seconds=0.2)
    cost_of(tiny_buddy("qwen2.5"), 2, seconds=0.2)
    assert len(list(home.iterdir())) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"rows": 2', '"rows": 9'),
        lambda text: json.dumps({**json.loads(text), "coefficients": ["x"] * NUM_COEFFICIENTS}),
        lambda text: json.dumps({**json.loads(text), "coefficients": [-1.0] * NUM_COEFFICIENTS}),
        lambda text: json.dumps({**json.loads(text), "coefficients": [1.0]}),
    ],
)
def test_a_damaged_file_is_measured_anew(home, damage, caplog):
    model = tiny_buddy()
    cost_of(model, 2, seconds=0.2)
    (path,) = home.iterdir()
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.WARNING, "buddy"):
        cost = cost_of(model, 2, seconds=0.2)
    assert "measured anew" in caplog.text
    assert list(home.iterdir()) == [path]
    assert json.loads(path.read_text())["coefficients"] == list(cost.coefficients)


def test_where_nothing_can_be_kept_it_is_measured_all_the_same(home, caplog):
    home.write_text("in the way")
    with caplog.at_level(logging.WARNING, "buddy"):
        assert cost_of(tiny_buddy(), 2, seconds=0.2).predict(Sample(depths=(3,)).shape) >= 0
    assert "not kept" in caplog.text
