"""What the project says of itself is true: metadata, the citation, the forms for issues."""

import re
import tomllib

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import buddy
from buddy.cli.registry import all_commands
from tests.test_docs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_the_versions_are_one():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {PROJECT["version"], citation["version"], buddy.__version__} == {buddy.__version__}
    assert citation["license"] in PROJECT["license"]


def test_the_classifiers_say_what_else_is_said():
    versions = [
        row.rpartition(" ")[2] for row in PROJECT["classifiers"] if re.search(r"3\.\d+$", row)
    ]
    assert versions
    assert all(SpecifierSet(PROJECT["requires-python"]).contains(version) for version in versions)
    assert ("Typing :: Typed" in PROJECT["classifiers"]) == (
        ROOT / "src" / "buddy" / "py.typed"
    ).exists()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_and_asks_for_what_there_is(path):
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form.keys() == {"name", "description", "labels", "body"}
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids)) <= 4
    assert {field["type"] for field in form["body"]} == {"textarea"}
    assert all(field["attributes"]["label"] for field in form["body"])
    named = set(re.findall(r"`buddy ([\w-]+)`", path.read_text()))
    known = {name for command in all_commands() for name in command.names} | {"--version"}
    assert named <= known
    files = re.findall(r"docs/[\w/.-]+\.md", path.read_text())
    assert all((ROOT / file).exists() for file in files)
