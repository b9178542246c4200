"""A model card goes with its checkpoint, and every checkpoint in the tree has one."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import buddy.hub
from buddy import BuddyForCausalLM
from buddy.checkpoint.card import CARD, Card, parse_card, read_card, write_card
from buddy.checkpoint.resolve import shipped_checkpoint
from buddy.cli.main import app
from buddy.cli.views.model_card import show_card
from buddy.errors import CheckpointError
from buddy.hub.presets import PRESETS, ROUTED_MODEL
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[3]
COMMITTED = sorted(
    path.parent
    for place in (Path(buddy.hub.__file__).parent, ROOT / "results")
    for path in place.rglob("buddy.json")
)


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_each_committed_checkpoint_says_base_licence_data_and_limits(folder):
    card = read_card(folder)
    assert card is not None
    assert card.facts["base_model"]
    assert card.facts["license"] != "unknown"
    assert "## Data" in card.text
    assert "CC BY-NC" in card.text  # Alpaca is among the data of each
    assert f'"{CARD}"' in (folder / "buddy.json").read_text()


def test_the_list_of_models_has_the_licence_of_the_card():
    card = read_card(shipped_checkpoint(ROUTED_MODEL))
    licence = PRESETS[ROUTED_MODEL].licence
    assert card.facts["license"] == licence.lower().replace(" ", "-")


def test_a_card_is_saved_and_loaded_with_its_checkpoint(tmp_path):
    model = BuddyForCausalLM(tiny_model())
    model.card = Card(text="# Ours\n\n---\nnot a header\n", facts={"license": "mit", "x": ["é"]})
    model.save_pretrained(tmp_path / "made")
    assert BuddyForCausalLM.from_pretrained(tmp_path / "made").card == model.card


def test_a_card_may_have_no_header_and_a_folder_no_card(tmp_path):
    assert read_card(tmp_path) is None
    (tmp_path / CARD).write_text("# Plain\n")
    assert read_card(tmp_path) == Card(text="# Plain\n")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"---\na: [\n---\n", "no YAML"),
        (b"---\na: 1\n", "no YAML"),
        (b"---\n- a\n---\n", "no names and values"),
        (b"---\na: !!python/object/apply:os.getcwd []\n---\n", "an alias or a tag"),
        (b"---\na: " + b"[" * 1_000_000 + b"\n---\n", "nested more than 100 deep"),
        (b"---\na: &x [*x]\n---\n", "an alias or a tag"),
        (b"---\na: &x [1]\nb: [*x, *x]\n---\n", "an alias or a tag"),
        (b"---\na: !!bool maybe\n---\n", "an alias or a tag"),
        (b"---\na: .nan\n---\n", "not JSON compliant"),
        (b"---\na: 0x" + b"f" * 5000 + b"\n---\n", "no YAML"),
        (b"\xff", "not UTF-8"),
        (b"x" * 2**21, "at most 1,048,576 are read"),
    ],
)
def test_a_card_that_cannot_be_read_is_one_line(tmp_path, content, says):
    (tmp_path / CARD).write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        read_card(tmp_path)
    assert "\n" not in str(caught.value)


def test_spaces_after_the_end_of_a_header_count_for_nothing():
    assert parse_card("--- \na: 1\n---\t \nText\n") == Card(text="Text\n", facts={"a": 1})


@pytest.mark.parametrize(
    "header", ["\nA rule is above.", "a: &x [1]\nb: [*x, *x]\n---", "[a]\n---"]
)
def test_a_model_is_shown_whose_readme_is_no_model_card(tmp_path, header):
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / CARD).write_text(f"---\n{header}\n")
    shown = CliRunner().invoke(app, ["info", str(tmp_path), "--json"])
    assert shown.exit_code == 0, shown.exception
    assert json.loads(shown.stdout)["card"] == {}
    asked = CliRunner().invoke(app, ["info", str(tmp_path), "--card"])
    assert isinstance(asked.exception, CheckpointError)


def test_a_date_is_a_text():
    facts = parse_card("---\nmade: 2024-01-31\nlast: 2024-01-31T10:00:00Z\n---\n").facts
    assert facts == {"made": "2024-01-31", "last": "2024-01-31T10:00:00Z"}
    assert parse_card(write_card(Card(text="x\n", facts=facts))).facts == facts


def test_what_two_facts_share_is_written_twice():
    both = ["en", "de"]
    facts = {"language": both, "tags": both}
    assert parse_card(write_card(Card(text="x\n", facts=facts))).facts == facts


def test_a_card_on_a_terminal_is_no_markup_and_steers_nothing(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    card = Card(text="a \x1b[2J b\n", facts={"license": "[/x] \x1b[31m", "tags": ["[red]", "b"]})
    show_card(card, "model")
    said = capsys.readouterr().out
    assert "[/x] \ufffd[31m" in said
    assert "[red], b" in said
    assert "\x1b[2J" not in said
    assert "\x1b[31m" not in said


@given(st.text(st.characters(exclude_categories=["C", "Z"])))
def test_what_was_written_is_read_again(text):
    facts = {"license": text, "tags": [text]}
    assert parse_card(write_card(Card(text="x\n", facts=facts))).facts == facts
