"""Chat templates and generation settings that fail: one line, from the command as from the code."""

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from buddy import load_tokenizer
from buddy.cli.chat_session import ChatSession
from buddy.cli.main import app
from buddy.cli.options import BudgetOptions, RoutingOptions, SamplingOptions
from buddy.data.examples import encode_chat
from buddy.errors import BuddyError, PromptError
from buddy.hub.config import read_generation_config
from tests.hostile.folders import edit
from tests.tiny import VOCAB

MESSAGES = [{"role": "user", "content": "w5 w6"}]


@pytest.fixture(scope="module")
def session(whole_model):
    """A loaded model; tests put another tokenizer or other settings in."""
    routing = RoutingOptions(engine="general")
    return ChatSession(str(whole_model), routing, BudgetOptions(), Console(quiet=True))


@pytest.fixture
def answer(session, model_folder, monkeypatch):
    """Answers with the tokenizer and the generation config of the folder."""

    def ask(**options):
        monkeypatch.setattr(session, "tokenizer", load_tokenizer(model_folder))
        made = read_generation_config(model_folder, VOCAB)
        monkeypatch.setattr(session.model, "generation_config", made)
        return session.answer(
            MESSAGES, BudgetOptions(), SamplingOptions(max_new_tokens=2), **options
        )

    return ask


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for m in messages %}", "TemplateSyntaxError: Unexpected end of template"),
        ("{{ raise_exception('no system\nrole') }}", "TemplateError: no system role"),
        ("{{ messages[0].a.b.c }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ no_such_filter | tojsonx }}", "TemplateAssertionError|TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        (
            "{{ messages.__class__.__init__.__globals__['os'].mkdir('x') }}",
            "SecurityError|Undefined",
        ),
        ("{% include '/etc/passwd' %}", "no loader|TypeError|TemplateNotFound"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
    ],
)
def test_a_template_that_fails_is_named_with_its_reason(model_folder, answer, template, says):
    (model_folder / "chat_template.jinja").write_text(template)
    with pytest.raises(
        PromptError, match=f"(?s)chat template of .*model fails: .*({says})"
    ) as caught:
        answer()
    assert "\n" not in str(caught.value)
    with pytest.raises(PromptError, match="chat template of"):
        encode_chat(load_tokenizer(model_folder), "w5")
    assert answer(raw=True).prompt_tokens == 2


def test_a_chat_ends_where_its_template_ends_a_turn(model_folder):
    (model_folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }} <pad> {% endfor %}"
    )
    (model_folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    routing = RoutingOptions(engine="general")
    made = ChatSession(str(model_folder), routing, BudgetOptions(), Console(quiet=True))
    assert made.model.generation_config.eos_token_id == [7, 0]


@pytest.mark.parametrize("template", [5, ["a"], {"other": "{{ 1 }}"}, [{"name": "a"}]])
def test_a_template_of_another_type_is_refused(model_folder, answer, template):
    (model_folder / "chat_template.jinja").unlink()
    edit(model_folder / "tokenizer_config.json", lambda c: c.update(chat_template=template))
    with pytest.raises(BuddyError) as caught:
        answer()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"num_beams": 4},
        {"num_beams": 4, "num_return_sequences": 3},
        {"do_sample": True, "temperature": 0.7, "top_k": 5},
    ],
)
def test_a_generation_config_does_not_contradict_a_streamed_answer(model_folder, answer, change):
    edit(model_folder / "generation_config.json", lambda g: g.update(change))
    assert len(answer().token_texts) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": "x"},
        {"repetition_penalty": -1.0},
        {"bad_words_ids": 5},
        {"suppress_tokens": ["a"]},
        {"suppress_tokens": [10**9]},
        {"sequence_bias": 5},
        {"max_time": "x"},
        {"stop_strings": ["a"]},
        {"guidance_scale": "x"},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"prompt_lookup_num_tokens": 3},
        {"use_cache": False},
        {"output_attentions": True},
    ],
)
def test_a_generation_config_that_cannot_be_followed_is_one_line(model_folder, answer, change):
    edit(model_folder / "generation_config.json", lambda g: g.update(change))
    said = ""
    try:  # some are harmless, depending on transformers
        answer()
    except BuddyError as error:
        said = str(error)
    assert "\n" not in said


def test_the_command_says_what_fails_and_prints_nothing(model_folder):
    (model_folder / "chat_template.jinja").write_text("{% if %}")
    done = CliRunner().invoke(app, ["generate", "w5", "--model", str(model_folder)])
    assert isinstance(done.exception, PromptError)
    assert done.stdout == ""
    path = model_folder / "chat_template.jinja"
    path.write_text("{{ messages[0]['content'] }}")
    done = CliRunner().invoke(app, ["generate", "w5", "--model", str(model_folder), "--json"])
    assert json.loads(done.stdout)["prompt_tokens"] == 1
