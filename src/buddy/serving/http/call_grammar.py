"""Grammars of answers that call tools: a call's arguments always follow the tool's schema.

They are written in llguidance's dialect of Lark. A mark that the tokenizer has as one token is
called by its number there: llguidance takes most such tokens for no text.
"""

import json
from collections.abc import Mapping
from typing import Any

from buddy.serving.http.tool_calls import CallFormat

Schema = Mapping[str, Any]


def call_grammar(
    form: CallFormat,
    tools: Mapping[str, Schema],
    added: Mapping[str, int],
    *,
    is_required: bool,
    is_single: bool,
    answer: Schema | None = None,
) -> str:
    """The grammar of an answer.

    Args:
        form: How the family writes calls.
        tools: JSON schemas of the arguments, by the name of the function.
        added: Tokens that stand for one text each, by their texts.
        is_required: Whether the answer is calls and nothing else.
        is_single: Whether there is one call at most.
        answer: JSON schema of an answer that calls nothing; any text if None.
    """

    def mark(text: str) -> str:
        return f"<[{added[text]}]>" if text in added else json.dumps(text)

    rules = {"function": " | ".join(f"function_{place}" for place in range(len(tools)))}
    for place, (name, schema) in enumerate(tools.items()):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "{form.key}": ')
        rules[f"function_{place}"] = f'{head} arguments_{place} "}}"'
        rules[f"arguments_{place}"] = f"%json {json.dumps(schema)}"
    opens, item = mark(form.mark), "call" if form.closes else "function"
    more = "" if is_single else f" ({json.dumps(form.between)} {item})*"
    if form.in_list:
        rest = f'" "? "[" function{more} "]"'
    elif form.closes:
        one = f'"\\n" function "\\n" {mark(form.closes)}'
        rules["call"], rest = f"{opens} {one}", one + more
    else:
        opens, rest = "", "function" + more
    rules["calls"] = f"{opens} {rest}"
    if is_required:
        rules["start"] = "calls"
    elif answer is not None:
        rules |= {"answer": f"%json {json.dumps(answer)}", "start": "answer | calls"}
    elif not form.is_needed:
        rules |= {"TEXT": r"/([^{\s](.|\n)*)?/", "start": "TEXT | calls"}
    else:
        # Once the mark stands in the text a call has begun, whatever the text might have been.
        lazy = "" if form.mark in added else "[lazy]"
        rules |= {"TEXT": r"/(.|\n)*/", f"begun{lazy}": f"TEXT {opens}"}
        rules["start"] = f"TEXT | begun {rest}"
    return "".join(f"{name}: {rule}\n" for name, rule in rules.items())
