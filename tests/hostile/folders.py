"""Parts of hostile folders: a tokenizer, pickles that run code, and a watch on what is opened."""

import json
import os
import pickle
import sys
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCAB

EXAMPLES = int(os.environ.get("BUDDY_FUZZ", "6"))
"""How many hostile files each fuzz makes; more take minutes."""


class _Canary:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def write_canary(file, sung):
    """A pickle that makes the folder `sung` when it is read."""
    file.write_bytes(pickle.dumps(_Canary(sung)))


def word_tokenizer():
    """One token for each of a few words."""
    words = {"<pad>": 0, "<s>": 1, **{f"w{i}": i for i in range(2, VOCAB)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}",
    )


def edit(path, change):
    """Change a JSON file in place."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def set_at(values, dotted, value):
    """Set what `a.b` names."""
    *tables, last = dotted.split(".")
    for table in tables:
        values = values[table]
    values[last] = value


_watch = None


def _hook(event, arguments):
    if _watch is not None and event == "open" and isinstance(arguments[0], str | bytes | Path):
        _watch.append(os.path.realpath(os.fsdecode(arguments[0])))


sys.addaudithook(_hook)


@contextmanager
def opened_files():
    """Every file that Python opens in the block."""
    global _watch
    _watch = []
    try:
        yield _watch
    finally:
        _watch = None
