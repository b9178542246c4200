"""An answer's text is parted alike however it comes in pieces: thought, said, called."""

import json
import random

import pytest

from buddy.budget.thinking import ThinkingMarks
from buddy.serving.http.speech import Speech
from buddy.serving.http.thinking import ThinkingReader
from buddy.serving.http.tool_calls import HERMES, LLAMA, MISTRAL, CallReader, format_of

MARKS = ThinkingMarks("<think>", "</think>", 1, 2)
F, G = '{"name": "f", "arguments": {"a": "</x>"}}', '{"name": "g", "arguments": {}}'
CALLED_F, CALLED_G = ("f", {"a": "</x>"}), ("g", {})


def cut(text, draw):
    """The text in random pieces."""
    places = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, len(text))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def parted(text, form=None, *, marks=None, is_open=False, most=None, draw=None):
    """Thought, text and calls, the same for any pieces."""
    found = set()
    for seed in range(40):
        speech = Speech(
            None if marks is None else ThinkingReader(marks, is_open=is_open),
            None if form is None else CallReader(form, most),
        )
        pieces = [text] if seed == 0 else cut(text, random.Random(seed))
        said = [*map(speech.push, pieces), speech.push("", is_last=True)]
        calls = [call for part in said for call in part.calls]
        assert len({call.id for call in calls}) == len(calls)
        found.add(
            (
                "".join(part.thought for part in said),
                "".join(part.text for part in said),
                json.dumps([(call.name, json.loads(call.arguments)) for call in calls]),
            )
        )
    ((thought, text, calls),) = found
    return thought, text, [tuple(call) for call in json.loads(calls)]


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (HERMES, f"<tool_call>\n{F}\n</tool_call>", "", [CALLED_F]),
        (HERMES, f"Let me see.\n<tool_call>\n{F}\n</tool_call>", "Let me see.", [CALLED_F]),
        (
            HERMES,
            f"<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>",
            "",
            [CALLED_F, CALLED_G],
        ),
        (HERMES, f"a <tool_call>\n{G}\n", "a", [CALLED_G]),
        (HERMES, "a <tool_call>\nno\n</tool_call> b", "a <tool_call>\nno\n</tool_call> b", []),
        (HERMES, "if a < b: <tool", "if a < b: <tool", []),
        (HERMES, f"{F}", f"{F}", []),
        (LLAMA, '{"name": "g", "parameters": {}}', "", [CALLED_G]),
        (
            LLAMA,
            '<|python_tag|>{"name": "g", "parameters": {}}; {"name": "g", "parameters": {}}',
            "",
            [CALLED_G, CALLED_G],
        ),
        (LLAMA, '{"answer": 7}', '{"answer": 7}', []),
        (
            LLAMA,
            'It is {"name": "g", "parameters": {}}',
            'It is {"name": "g", "parameters": {}}',
            [],
        ),
        (MISTRAL, f"[TOOL_CALLS] [{F}, {G}]", "", [CALLED_F, CALLED_G]),
        (MISTRAL, "see [TOOL_CALLS", "see [TOOL_CALLS", []),
        (MISTRAL, f"[TOOL_CALLS] [{F}", f"[TOOL_CALLS] [{F}", []),
    ],
)
def test_calls_are_read_and_what_is_none_is_said(form, text, said, calls):
    assert parted(text, form) == ("", said, calls)


def test_of_several_calls_the_first_is_read_where_one_is_allowed():
    text = f"<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>"
    assert parted(text, HERMES, most=1) == ("", "", [CALLED_F])


@pytest.mark.parametrize(
    ("text", "is_open", "thought", "said"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm\n", "yes"),
        ("hm\n</think>yes", True, "hm\n", "yes"),
        ("  yes <think>no</think>", False, "", "  yes <think>no</think>"),
        ("<think>hm </thin", False, "hm </thin", ""),
        ("<thing>", False, "", "<thing>"),
        ("", True, "", ""),
    ],
)
def test_what_is_thought_first_is_no_part_of_the_answer(text, is_open, thought, said):
    assert parted(text, marks=MARKS, is_open=is_open) == (thought, said, [])


def test_a_call_after_thinking():
    text = f"<think>f or g?</think>\n<tool_call>\n{G}\n</tool_call>"
    assert parted(text, HERMES, marks=MARKS) == ("f or g?", "", [CALLED_G])


def test_the_form_is_that_of_the_template():
    assert format_of("... <tool_call> ...") is HERMES
    assert format_of("... [TOOL_CALLS] ...") is MISTRAL
    assert format_of("... [TOOL_CALLS] [ARGS] ...") is None
    assert format_of('respond with {"name": n, "parameters": p}') is LLAMA
    assert format_of("{{ messages }}") is None


def test_a_prompt_may_end_within_thinking():
    assert MARKS.is_open([5, 1, 7])
    assert not MARKS.is_open([5, 1, 7, 2, 9])
    assert not MARKS.is_open([5])
