"""What is said of a model whose dtype makes it far slower than it could be."""

import platform

import pytest
import torch

from buddy.engine.dtype_warning import notes_on_dtype
from buddy.engine.executors.native import instructions
from tests.tiny import tiny_buddy


@pytest.mark.parametrize(
    ("machine", "features", "dtype", "is_slow"),
    [
        ("x86_64", {"avx2"}, torch.bfloat16, True),
        ("x86_64", {"avx2", "avx512f"}, torch.bfloat16, True),
        ("x86_64", {"avx2"}, torch.float32, False),
        ("x86_64", {"avx2", "avx512_bf16"}, torch.bfloat16, False),
        ("x86_64", {"avx2", "avx_ne_convert"}, torch.bfloat16, False),
        ("x86_64", set(), torch.bfloat16, False),
        ("aarch64", {"asimd"}, torch.bfloat16, False),
    ],
)
def test_bfloat16_without_instructions_for_it_is_warned_of(
    monkeypatch, machine, features, dtype, is_slow
):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(instructions, "cpu_features", lambda: frozenset(features))
    notes = notes_on_dtype(tiny_buddy().to(dtype).backbone)
    assert len(notes) == is_slow
    assert all("float32" in note for note in notes)
