"""The pages' Python blocks run, a page's in one namespace, and their links lead somewhere."""

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest

import buddy
from buddy.errors import FetchError
from buddy.hub.store import ensure_published
from buddy.records import read_record

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"(?P<real><!-- default model -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)
PLACE = re.compile(r"`([\w.-]+(?:/[\w.-]+)+/?)`")
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|#)([^)#]+)[^)]*\)")


def blocks(page):
    return list(BLOCK.finditer(page.read_text()))


def named(page):
    """A page as `folder/name`."""
    return page.relative_to(DOCS if DOCS in page.parents else ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=named)
def test_python_blocks_run(page):
    namespace = {"__name__": page.stem}
    for block in blocks(page):
        if block["real"]:
            try:
                ensure_published()
            except FetchError as error:
                pytest.skip(f"the default model cannot be had here: {error}")
        line = page.read_text()[: block.start("code")].count("\n")
        # Blank lines in front, so that a failure names the page's own line.
        exec(compile("\n" * line + block["code"], str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=named)
def test_files_that_a_page_names_exist(page):
    ours = [place for place in PLACE.findall(page.read_text()) if is_ours(place)]
    roots = (ROOT, ROOT / "src" / "buddy", ROOT / "src" / "buddy" / "engine", page.parent)
    missing = [place for place in ours if not any((root / place).exists() for root in roots)]
    assert missing == []


def is_ours(place):
    """Whether it names a file or folder of this repository, and no model, run or user's file."""
    first, _, rest = place.partition("/")
    if first in ("src", "tests", "benchmarks", "recipes", "deploy", "packages", "results", ".ci"):
        return True
    return rest.endswith(".py") and (ROOT / "src" / "buddy" / first).exists()


def test_the_design_lists_the_floors_that_are_enforced():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract, *_ = settings["tool"]["importlinter"]["contracts"]
    floors = [floor.replace("buddy.", "") for floor in contract["layers"]]
    assert "\n".join(["```", *floors, "```"]) in (DOCS / "explanation" / "design.md").read_text()


def script(name):
    """What a script in `benchmarks/` defines."""
    return runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))


def test_the_tables_of_static_methods_are_those_of_the_records():
    tables = script("static_table")
    page = (DOCS / "benchmarks" / "static-pruning.md").read_text()
    results = ROOT / "results" / "eval"
    assert tables["accuracy_table"](results / "static-tasks.json") in page
    assert tables["perplexity_table"](results / "static-ppl.json") in page


def test_the_tables_of_methods_are_those_of_the_records():
    tables = script("methods_table")
    compared = (DOCS / "benchmarks" / "methods.md").read_text()
    assert all(table in compared for table in tables["default_tables"]())
    others = (DOCS / "research" / "other-models.md").read_text()
    assert all(table in others for table in tables["qwen_tables"]())


def test_what_depth_costs_is_as_the_records_have_it():
    tables = script("depth_table")
    assert tables["table"]() in (ROOT / "README.md").read_text()
    page = (DOCS / "benchmarks" / "quality.md").read_text()
    assert tables["losses"]() in page
    assert tables["accuracy"]() in page


def test_the_tables_of_speed_and_goodput_are_those_of_the_records():
    tables = script("speed_table")
    page = (DOCS / "benchmarks" / "speed.md").read_text()
    assert all(table in page for table in tables["speed_tables"]())
    serving = (DOCS / "benchmarks" / "serving.md").read_text()
    assert all(tables[name]() in serving for name in ("goodput_table", "beside_table"))
    (at_3,) = (row for row in tables["goodput_rows"]() if row[0] == "3.4")
    whole, half, chosen = (cell.partition(" at ")[0] for cell in at_3[1:])
    said = " ".join((ROOT / "README.md").read_text().split())
    assert f"Offered 3.4 requests/s, two AVX2 cores give {chosen} good answers/s" in said
    assert f"at full depth {whole}; fixed half depth gives {half}" in said


def test_what_is_left_of_long_answers_is_as_the_record_has_it(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as `python benchmarks/NAME.py` does
    record = read_record(ROOT / "results" / "routing" / "long-answers.json")
    page = (DOCS / "benchmarks" / "routing-larger.md").read_text()
    assert script("long_answers")["table"](record["results"]["points"]) in page


def test_what_kinds_gain_under_adapters_is_as_the_record_has_it(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as `python benchmarks/NAME.py` does
    record = read_record(ROOT / "results" / "training" / "tuned-routes.json")
    page = (DOCS / "benchmarks" / "routing.md").read_text()
    assert script("tuned_routes")["table"](record["results"]["points"]) in page


def test_what_makes_a_router_learn_is_as_the_record_has_it(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as `python benchmarks/NAME.py` does
    points = read_record(ROOT / "results" / "training" / "learning.json")["results"]["points"]
    table, page = script("learning")["table"], (DOCS / "benchmarks" / "learning.md").read_text()
    assert table(points, "prior") in page
    learnt = [p for p in points if p["way"] == "trained" and p["arm"] != "static"]
    assert table(learnt, "order") in page
    assert table(learnt, "frozen") in page
    gates = read_record(ROOT / "results" / "training" / "gate-derivatives.json")["results"]
    assert script("gate_derivatives")["table"](gates["points"]) in page


def test_what_one_model_for_many_depths_loses_is_as_the_record_has_it(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as `python benchmarks/NAME.py` does
    points = read_record(ROOT / "results" / "training" / "one-for-many.json")["results"]["points"]
    page = (DOCS / "benchmarks" / "one-for-many.md").read_text()
    assert script("one_for_many")["table"](points) in page


def test_what_loading_takes_is_as_the_records_have_it():
    table, page = script("load_memory")["memory_table"], DOCS / "benchmarks" / "memory.md"
    records = sorted((ROOT / "results").glob("load-memory*.json"))
    assert records
    assert all(table(record) in page.read_text() for record in records)
    rows = table(ROOT / "results" / "load-memory.json").splitlines()[-2:]
    int8, int4 = ([cell.strip() for cell in row.split("|")] for row in rows)
    said = " ".join((ROOT / "CHANGELOG.md").read_text().split())
    assert f"{int8[5]} (int8) and {int4[5]} (int4) stay" in said
    assert f"loading takes {int8[7]} and {int4[7]} times what stays" in said


def test_what_routing_of_frozen_weights_gains_is_as_the_record_has_it():
    tables = runpy.run_path(str(ROOT / "benchmarks" / "route_table.py"))
    records = ROOT / "results" / "routing"
    record = json.loads((records / "smollm2-135m.json").read_text())
    page = (ROOT / "docs" / "benchmarks" / "routing.md").read_text()
    for name in ("smollm2-135m", "smollm2-135m-answer-tokens"):
        assert tables["by_depth"](json.loads((records / f"{name}.json").read_text())) in page
    larger = (ROOT / "docs" / "benchmarks" / "routing-larger.md").read_text()
    for name in ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"):
        assert tables["by_depth"](json.loads((records / f"{name}.json").read_text())) in larger
    assert tables["by_kind"](record, 26) in page
    assert tables["by_kind"](record, 22) in page
    (at_22,) = (each for each in record["results"]["tables"]["groups"] if each["blocks"] == 22)
    assert f"{at_22['gain']:.2f} nats at 22 of 30 blocks" in (ROOT / "README.md").read_text()


def test_what_a_ledger_gains_on_frozen_weights_is_as_the_record_has_it():
    tables = runpy.run_path(str(ROOT / "benchmarks" / "route_table.py"))
    records = ROOT / "results" / "routing"
    page = (ROOT / "docs" / "benchmarks" / "routing.md").read_text()
    routed = json.loads((records / "smollm2-135m-answer-tokens.json").read_text())
    assert tables["by_mean"](routed) in page
    alone = json.loads((records / "ledger-frozen.json").read_text())
    for row in alone["results"]["evaluation"]:
        assert f"{-row['difference']:.3f} ± {row['stderr']:.3f}" in page


def test_what_fewer_bits_cost_is_as_the_record_has_it():
    page = (DOCS / "benchmarks" / "memory.md").read_text()
    records = map(read_record, (ROOT / "results").glob("quantised-quality*.json"))
    cells = [cell for record in records for cell in record["results"]["cells"]]
    assert len(cells) == 16
    for cell in cells:
        plain = cell["condition"] == "base"
        over = "" if plain else f"{cell['over_base']:.3f} ± {cell['over_base_stderr']:.3f}"
        name, mean = "bfloat16" if plain else cell["condition"], f"{cell['mean_of_answers']:.3f}"
        assert f"| {cell['blocks']} | {name} | {cell['nll']:.3f} | {over} | {mean} |" in page


def test_what_drafts_gain_is_as_the_record_has_it():
    page = (DOCS / "explanation" / "drafts.md").read_text()
    for cell in json.loads((ROOT / "results" / "drafts.json").read_text())["results"]["cells"]:
        assert f"{cell['speedup']:.2f} ({cell['least']:.2f} to {cell['most']:.2f})" in page
        assert cell["same_text"] == cell["prompts"]


def test_what_avx2_does_beside_llama_cpp_is_as_the_records_have_it():
    page = (DOCS / "benchmarks" / "speed.md").read_text()
    for name in ("bf16", "int8", "int4", "q4_1"):
        record = read_record(ROOT / "results" / f"beside-llama-avx2-{name}.json")
        speeds = {}
        for cell in record["results"]["cells"]:
            speeds.setdefault(cell["engine"], []).append(cell)
        full, half, other = speeds.values()
        ours = (
            f"{a['tokens_per_s']:,.0f}, {b['tokens_per_s']:,.0f}"
            for a, b in zip(full, half, strict=True)
        )
        theirs = (f"{cell['tokens_per_s']:.0f} ({cell['buddy_over_it']:.2f})" for cell in other)
        assert " | " + " | ".join(ours) + " |" in page
        assert " | " + " | ".join(theirs) + " |" in page
    for size in ("0.5", "1.5"):
        record = read_record(
            ROOT / "results" / f"beside-llama-avx2-qwen{size.replace('.', '')}.json"
        )
        other = [c for c in record["results"]["cells"] if c["engine"] == "llama.cpp"]
        *first, last = (f"{cell['buddy_over_it']:.2f}" for cell in other)
        assert f"{', '.join(first)} and {last}" in page


def test_what_long_contexts_take_beside_llama_cpp_is_as_the_records_have_it():
    page, ratios = (DOCS / "benchmarks" / "speed.md").read_text(), {"decode": [], "prefill": []}
    for name in ("long", "16384"):
        record = read_record(ROOT / "results" / f"beside-llama-avx2-qwen05-{name}.json")
        for cell in record["results"]["cells"]:
            if cell["engine"] == "llama.cpp":
                ratios[cell["phase"]].append(f"{cell['buddy_over_it']:.2f}")
    assert "decode {}, {} and {} times llama.cpp's".format(*ratios["decode"]) in page
    assert "prefill {}, {} and {} (".format(*ratios["prefill"]) in page


def test_the_speed_that_the_readme_names_is_that_of_the_record():
    record = json.loads((ROOT / "results" / "engine-shipped.json").read_text())
    cells = record["results"]["shapes"][0]["cells"]
    whole, half = cells["dense"], cells["routed 15"]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{1 / whole['decode_s']:.0f} tokens/s with all 30 blocks" in text
    assert f"{whole['decode_over_transformers']:.1f} times transformers' `generate`" in text
    assert f"and {1 / half['decode_s']:.0f} with 15" in text


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name != "research"], ids=named)
def test_a_page_outside_research_is_short_enough_to_read(page):
    assert len(page.read_text().split()) <= 2500


def test_every_page_is_in_the_navigation():
    settings = (ROOT / "mkdocs.yml").read_text()
    entries = re.findall(r"- (?:[\w -]+: )?([\w/-]+\.md)$", settings, re.MULTILINE)
    assert sorted(entry for entry in entries if "repository/" not in entry) == sorted(
        named(page) for page in PAGES if DOCS in page.parents
    )


def test_every_public_name_has_a_page():
    """Public is what `buddy` exports, and what the pages and examples import by module."""
    reference = "".join(page.read_text() for page in (DOCS / "reference").rglob("*.md"))
    shown = re.findall(r"^::: ([\w.]+)$", reference, re.MULTILINE)
    codes = [block["code"] for page in PAGES for block in blocks(page)]
    codes += [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    wanted = {f"{place}.{name}" for name, place in buddy._WHERE.items()}
    for code in codes:
        for module, names in re.findall(r"^from (buddy\.[\w.]+) import (.+)", code, re.MULTILINE):
            wanted |= {f"{module}.{name.strip()}" for name in names.split(",")}
    assert {name for name in wanted if not {name, name.rpartition(".")[0]} & set(shown)} == set()
