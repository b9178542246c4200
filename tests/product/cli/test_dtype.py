"""`--dtype`: what is measured is measured in the numbers that were asked for."""

import json

import pytest

from tests.product.cli import test_cli

folder = test_cli.folder
run = test_cli.run


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"w{2 + (i * i + i // 7) % 95}" for i in range(400)))
    return str(path)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": f"w{i} w9", "completion": f"w{i + 3} w4"}) + "\n"
            for i in range(2, 6)
        )
    )
    return str(path)


def _commands(folder, text, rows):
    windows = ("--windows", "4", "--tokens", "8")
    return {
        "importance": ("importance", folder, "--text", text, *windows),
        "ranks": ("observe", "ranks", folder, "--text", text, "--inputs", "3", "--tokens", "8"),
        "ppl": ("eval", "ppl", "-m", folder, "--text", text, "--window", "16", "--stride", "8"),
        "answers": ("eval", "answers", rows, "-m", folder, "--template", "alpaca"),
        "bench": (
            *("bench", "-m", folder, "-b", "0.5", "--context", "8", "--new-tokens", "2"),
            *("--rounds", "1", "--no-transformers"),
        ),
    }


def test_an_answer_is_computed_in_the_dtype_that_was_asked_for(folder):
    done = run("generate", "w3 w4", "-m", folder, "--dtype", "float16", "--max-tokens", "2")
    assert done.returncode == 0, done.stderr
    assert "its weights are torch.float16" in done.stderr


@pytest.mark.parametrize("command", ["importance", "ranks", "ppl", "answers", "bench"])
def test_a_measurement_is_made_in_the_dtype_that_was_asked_for(
    folder, text, rows, tmp_path, command
):
    results = {}
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / f"{dtype}.json"
        arguments = _commands(folder, text, rows)[command]
        done = run(*arguments, "--dtype", dtype, "--out", str(out))
        assert done.returncode == 0, done.stderr
        record = json.loads(out.read_text())
        assert record["config"]["dtype"] == f"torch.{dtype}"
        results[dtype] = record["results"]
    assert results["float32"] != results["bfloat16"]


def test_a_search_begins_with_an_order_and_keeps_its_dtype(folder, text, tmp_path):
    order, out = tmp_path / "order.json", tmp_path / "found.json"
    passages = ("--text", text, "--windows", "4", "--tokens", "8", "--dtype", "bfloat16")
    assert run("importance", folder, *passages, "--out", str(order)).returncode == 0
    done = run(
        *("search", folder, "--order", str(order), "--depths", "4", *passages),
        *("--max-swaps", "2", "--out", str(out)),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["config"]["dtype"] == "torch.bfloat16"


def test_another_dtype_is_refused_in_one_line_before_anything_is_loaded(text, tmp_path):
    out = str(tmp_path / "x.json")
    done = run("eval", "ppl", "-m", "nowhere", "--text", text, "--dtype", "half", "--out", out)
    assert done.returncode == 2
    (line,) = [text for text in done.stderr.splitlines() if "dtype" in text]
    assert "must be bfloat16, float16 or float32, got 'half'" in line
