"""Variables of a chat template on the command line: obeyed, or refused by name."""

import json

import pytest

from buddy.cli.template_option import TemplateVariable, check_template, template_variables
from buddy.errors import PromptError
from tests.product.cli.test_cli import run
from tests.product.cli.test_thinking import thinking_tokenizer
from tests.tiny import tiny_buddy

SHORT = ("--max-new-tokens", "4", "--engine", "general")
TEMPLATE = (
    "{{ messages[-1]['content'] }}{{ ' w9' * (effort or 0) }} <think>"
    "{% if not enable_thinking %} </think>{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("variables") / "model"
    tokenizer = thinking_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tiny_buddy().save_pretrained(path, tokenizer=tokenizer)
    return str(path)


@pytest.mark.parametrize(
    ("options", "prompt_tokens"),
    [
        ((), 3),
        (("enable_thinking=False",), 3),
        (("enable_thinking=true", "effort=3"), 5),
    ],
)
def test_generate_sets_the_variables_of_the_template(checkpoint, options, prompt_tokens):
    given = [part for option in options for part in ("--template-option", option)]
    done = run("generate", "w3", "-m", checkpoint, "--json", *SHORT, *given)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt_tokens"] == prompt_tokens


def test_chat_does_so_too(checkpoint):
    asked = ("-m", checkpoint, *SHORT, "--template-option")
    chat = run("chat", "--no-history", *asked, "enable_thinking=true", stdin="w3\n")
    assert chat.returncode == 0, chat.stderr
    thinking, plain = (
        run("generate", "w3", *asked, f"enable_thinking={value}").stdout.strip()
        for value in ("true", "false")
    )
    assert thinking != plain
    assert chat.stdout.strip() == thinking


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--template-option", "depth=3"), "--template-option depth: the model's chat template"),
        (("--raw", "--template-option", "effort=1"), "--template-option has no place"),
    ],
)
def test_what_would_not_be_obeyed_is_refused_by_name(checkpoint, arguments, says):
    done = run("generate", "w3", "-m", checkpoint, *arguments)
    assert done.returncode != 0
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["message=5"], "message: the model's chat template has no such"),  # that of its loop
        (["tools=3"], "tools: it is not for callers to set"),
        (["enable_thinking=off"], "enable_thinking: expected true or false, got 'off'"),
        (["enable_thinking"], "must be KEY=VALUE, such as enable_thinking=true, got"),
        (["=3"], "must be KEY=VALUE"),
        (["effort=1", "effort=2"], "effort has two values"),
    ],
)
def test_so_is_what_is_no_variable(given, says):
    tokenizer = thinking_tokenizer()
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(PromptError, match=says):
        check_template(tokenizer, template_variables(list(map(TemplateVariable.read, given))))


def test_values_are_json_or_text():
    written = ["a=true", "b=False", "c=3", "d=[1]", "e=low", "f=", "g=x=y"]
    assert template_variables(list(map(TemplateVariable.read, written))) == {
        **{"a": True, "b": False, "c": 3, "d": [1], "e": "low", "f": "", "g": "x=y"}
    }
