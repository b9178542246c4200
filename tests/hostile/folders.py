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
SHAPES_BEYOND_TORCH = [[0, 2**63], [0, 2**31, 2**32]]
"""A header may have them, as no byte belongs to them."""


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


def forge_shape(path, name, shape):
    """Have a safetensors file say that a tensor, of its own or another, has this shape."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    own = header.pop(name, {"data_offsets": [0, 0]})["data_offsets"]
    for entry in header.values():  # its bytes go with it
        if entry.get("data_offsets", [-1])[0] >= own[1]:
            entry["data_offsets"] = [at - own[1] + own[0] for at in entry["data_offsets"]]
    header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [own[0], own[0]]}
    text = json.dumps(header).encode()
    path.unlink()  # what was loaded may be mapped
    data = content[end : end + own[0]] + content[end + own[1] :]
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


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
