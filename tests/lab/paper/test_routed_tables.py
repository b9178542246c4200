"""Tables that look at routes: made end to end on a tiny model, and gone on with."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from buddy import BuddyForCausalLM
from buddy.cli.main import app
from buddy.data.examples import Example
from buddy.errors import ResultError
from buddy.lab.paper.routes import routes_by_running, routes_of
from buddy.lab.paper.run import Run
from buddy.lab.paper.tables.budgets import histogram
from tests.lab.paper.made import make, save_model
from tests.tiny import random_ids, tiny_buddy


@pytest.mark.parametrize("planner", [{}, {"context": "key+value"}])
def test_routes_from_token_ids_are_those_that_run(planner):
    model = tiny_buddy("llama", **planner)
    ids = random_ids(1, 24)[0].tolist()
    example = Example(tuple(ids[:7]), tuple(ids[7:]), "made")
    pieces = [example.prompt, *((token,) for token in example.answer)]
    found = routes_of(model, example, [3, 4, 5], answer_tokens=99)
    assert found == [routes_by_running(model, pieces, depth) for depth in (3, 4, 5)]
    assert any(len(set(plans)) > 1 for plans in found), "nothing depends on the tokens"


def test_paths_are_counted_and_drawn(model, data, tmp_path):
    collected, record, _ = make("paths", model, data, tmp_path / "out", rows=20)
    points = record["results"]["points"]
    assert {(point["prompts"], point["blocks"]) for point in points} == {
        (name, blocks) for name in ("alpaca", "samsum") for blocks in (5, 4, 3)
    }
    for point in points:
        assert 1 <= point["of_prompts"] <= min(point["of_tokens"], point["inputs"])
        assert 1 <= point["per_answer"] <= point["of_tokens"]
    assert max(point["of_prompts"] for point in points) > 1, "the router is random"
    assert record["kind"] == "reproduce-paths"
    assert record["model"] == BuddyForCausalLM.from_pretrained(model).facts()
    assert (tmp_path / "out" / "paths.png").read_bytes().startswith(b"\x89PNG")
    (sheet,) = collected.sheets
    assert {len(row) for row in sheet.rows} == {len(sheet.columns)}


def test_a_finished_step_is_not_measured_again(model, data, tmp_path, monkeypatch):
    out = tmp_path / "out"
    _, first, said = make("paths", model, data, out, rows=8)
    assert said == ["routes"]

    def measured(*arguments, **options):
        raise AssertionError("it was measured again")

    monkeypatch.setattr("buddy.lab.paper.routes.routes_of", measured)
    _, again, said = make("paths", model, data, out, rows=8)
    assert said == []
    assert again["results"] == first["results"]
    with pytest.raises(ResultError, match=r"other settings: rows \(was 8, is 9\).*delete it"):
        make("paths", model, data, out, rows=9)


def test_a_step_of_another_model_is_not_used(model, data, tmp_path):
    own = save_model(tmp_path / "model")
    make("paths", own, data, tmp_path / "out", rows=4)
    tiny_buddy("llama", predictor=True).save_pretrained(own)
    with pytest.raises(ResultError, match="base"):
        make("paths", own, data, tmp_path / "out", rows=4)


def test_a_step_of_other_data_is_not_used(model, data, tmp_path):
    make("paths", model, data, tmp_path / "out", rows=4)
    other = shutil.copytree(data, tmp_path / "other")
    with pytest.raises(ResultError, match="other settings: data"):
        make("paths", model, other, tmp_path / "out", rows=4)


def test_a_step_of_a_time_before_dtypes_is_used(model, data, tmp_path):
    _, first, _ = make("paths", model, data, tmp_path / "out", rows=4)
    assert "dtype" not in json.loads((tmp_path / "out" / "routes.json").read_text())["config"]
    _, again, said = make("paths", model, data, tmp_path / "out", rows=4)
    assert (said, again["results"]) == ([], first["results"])


def test_a_histogram_has_fifths_and_an_edge_is_below():
    # Of 10 blocks: 2 is a fifth, and the first interval ends there.
    assert histogram([2, 3, 4, 10], 10) == [0.25, 0.5, 0.0, 0.0, 0.25]


def test_as_it_is_typed_it_ends_in_a_table_and_paths_on_stdout(model, data, tmp_path):
    out = tmp_path / "out"
    command = ["reproduce", "paths", "-m", model, "--data-dir", str(data), "--out", str(out)]
    done = CliRunner().invoke(app, [*command, "--rows", "4"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.split() == [str(out / "paths.json"), str(out / "paths.png")]
    assert "Distinct inference paths" in done.stderr
    assert "The paper routes what Llama models generate" in done.stderr


def test_interrupted_it_says_how_to_go_on(model, data, tmp_path, monkeypatch):
    def interrupted(self, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "measure", interrupted)
    command = ["reproduce", "paths", "-m", model, "--data-dir", str(data)]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
    assert done.exit_code == 130
    assert "the same command goes on" in done.stderr
