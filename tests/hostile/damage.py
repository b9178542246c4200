"""What can befall a compiled library that was written whole."""

import ctypes
import os
from pathlib import Path


def works(library):
    team = ctypes.create_string_buffer(64)
    engine = library.calls.buddy_engine_new(ctypes.byref(team))
    library.calls.buddy_engine_free(engine)
    return bool(engine)


# Damage to a library that was written whole.
def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _become(make):
    def change(path):
        path.unlink()
        make(path)

    return change


DAMAGE = {
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one byte long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: os.truncate(path, 0),
    "junk": lambda path: path.write_bytes(b"junk" * 1000),
    "one bit": _flip,
    "unreadable": lambda path: path.chmod(0),
    "a link to nowhere": _become(lambda path: path.symlink_to("nowhere")),
    "a link to itself": _become(lambda path: path.symlink_to(path.name)),
    "a pipe": _become(os.mkfifo),
    "gone": Path.unlink,
}
