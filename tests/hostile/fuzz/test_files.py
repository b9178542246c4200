"""Headers of safetensors and of GGUF: what is damaged or forged ends in one line."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from buddy.checkpoint.tensors import read_tensors
from buddy.hub.gguf.header import read_header
from buddy.hub.weights import open_weights
from tests.hostile.fuzz import FUZZ, JSON, damaged, only_ours
from tests.product.hub.gguf_files import write_gguf

NAME = "model.safetensors"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    tensors = {"a.weight": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, folder / NAME, {"format": "pt"})
    return folder, (folder / NAME).read_bytes()


def read(folder):
    with open_weights(folder) as slices:
        for piece in slices.values():
            piece.get_shape()


def test_damaged_safetensors(weights):
    folder, content = weights

    @FUZZ
    @given(damaged(content))
    def check(found):
        (folder / NAME).write_bytes(found)
        only_ours(lambda: read_tensors(folder, NAME))
        only_ours(lambda: read(folder))

    check()


def test_forged_headers_of_safetensors(weights):
    folder, content = weights
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    dtypes = ["F32", "BF16", "F16", "I64", "U8", "BOOL", "F8_E4M3", "F64", "C64", "F4", "x"]
    size = st.sampled_from([0, 1, 2, 3, 6, 8, 24, 32, 33, -1, 2**31, 2**32, 2**63, 2**64])
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(dtypes),
            "shape": st.lists(size, max_size=4),
            "data_offsets": st.lists(size, min_size=2, max_size=2),
        }
    )
    keys = st.sampled_from([*header, "c", "", "\n", "x" * 300])

    @FUZZ
    @given(st.dictionaries(keys, entry | JSON, max_size=3))
    def check(changes):
        text = json.dumps({**header, **changes}).encode()
        (folder / NAME).write_bytes(len(text).to_bytes(8, "little") + text + data)
        only_ours(lambda: read_tensors(folder, NAME))
        only_ours(lambda: read(folder))

    check()


def test_damaged_headers_of_gguf(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    content = path.read_bytes()
    header = read_header(path)
    assert header.architecture == "llama"
    end = content.index(b"blk.1.attn_q")

    @FUZZ
    @given(damaged(content[:end]), st.booleans())  # short enough to be printed
    def check(found, is_cut):
        path.write_bytes(found if is_cut else found + content[end:])
        only_ours(lambda: read_header(path))

    check()


@pytest.mark.parametrize("text", [b"\n", b"\x1b", b"\xc2\x85", b"\xe2\x80\xa8"])
def test_a_key_of_gguf_with_line_ends_is_told_on_one_line(tmp_path, text):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    content = path.read_bytes()
    place = content.index(b"embedding_length")
    path.write_bytes(content[:place] + text + content[place + len(text) :])
    error = only_ours(lambda: read_header(path))
    assert error is not None
    assert str(error).isprintable()
