"""Weights that are read into one stretch of memory are those of the files."""

import copy
import gc
import pickle
import resource
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from buddy.backbone.memory import LARGE_PAGE, zeroed_memory
from buddy.errors import CheckpointError
from buddy.hub import aligned_load
from buddy.hub.aligned_load import LINE, read_aligned
from buddy.hub.loading import load_model
from buddy.hub.place import find_model
from buddy.hub.weights import open_weights
from tests.tiny import tiny_model


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama3").to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def read(folder):
    with open_weights(folder) as tensors:
        return read_aligned(folder, tensors)


def test_every_weight_is_that_of_its_file_at_the_beginning_of_a_line(folder):
    expected = load_file(folder / "model.safetensors")
    placed = read(folder)
    assert placed.keys() == expected.keys()
    assert all(torch.equal(placed[name], expected[name]) for name in expected)
    assert all(one.data_ptr() % LINE == 0 for one in placed.values())
    begins = min(one.data_ptr() for one in placed.values())
    ends = max(one.data_ptr() + one.nbytes for one in placed.values())
    assert ends - begins <= sum(-(-one.nbytes // LINE) * LINE for one in placed.values())


def test_what_pickles_or_copies_a_weight_takes_nothing_of_the_others(folder):
    for name, one in read(folder).items():
        assert len(pickle.dumps(one)) < one.nbytes + 1000, name
        assert copy.deepcopy(one).untyped_storage().nbytes() == one.nbytes, name


@pytest.mark.parametrize(("threads", "has_placed_reads"), [(1, True), (3, True), (1, False)])
def test_weights_of_several_files_and_odd_sizes(tmp_path, monkeypatch, threads, has_placed_reads):
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.setattr(aligned_load, "_HAS_PLACED_READS", has_placed_reads)
    tiny_model().save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    odd = load_file(files[0]) | {"odd": torch.arange(7.0), "none": torch.zeros(0, 3)}
    save_file(odd, files[0])
    expected = {name: one for path in files for name, one in load_file(path).items()}
    placed = read(tmp_path)
    assert placed.keys() == expected.keys()
    assert all(torch.equal(placed[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_has_the_numbers_of_its_files_in_any_format(folder, dtype):
    model = load_model(find_model(folder), dtype=dtype, device="cpu")
    stored = load_file(folder / "model.safetensors")
    found = dict(model.named_parameters())
    assert all(torch.equal(one, stored[name].to(dtype)) for name, one in found.items())
    at = {name: one.data_ptr() % LINE for name, one in found.items()}
    assert dtype != torch.bfloat16 or set(at.values()) == {0}


def test_a_file_that_is_cut_short_meanwhile_is_refused(folder):
    path = folder / "model.safetensors"
    with open_weights(folder) as tensors:
        whole = path.read_bytes()
        path.unlink()  # what is mapped stays whole
        path.write_bytes(whole[:-1])
        with pytest.raises(CheckpointError, match="ends in the middle of a weight"):
            read_aligned(folder, tensors)


@pytest.mark.parametrize("threads", [1, 3])
def test_where_reading_ends_early_what_is_left_is_not_read(folder, monkeypatch, threads):
    begun = []

    def interrupted(file, begin, view):
        begun.append(begin)
        time.sleep(0 if begin == min(begun) else 0.2)
        if begin == min(begun):
            raise KeyboardInterrupt
        return len(view)

    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.setattr(aligned_load, "_read_at", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read(folder)
    assert len(begun) <= 3 * threads < len(load_file(folder / "model.safetensors"))


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_memory_that_the_system_has_not_is_an_error_of_memory():
    with pytest.raises(MemoryError, match="the system has no"):
        zeroed_memory(2**62)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc on this system")
def test_memory_is_zero_taken_when_written_and_given_back():
    before = resident_bytes()
    memory = zeroed_memory(64 * LARGE_PAGE)
    assert memory.data_ptr() % LARGE_PAGE == 0
    assert resident_bytes() - before < 4 * LARGE_PAGE
    part = memory[5 * LARGE_PAGE :].view(torch.float32)
    assert not part.any()
    memory.fill_(1)
    assert resident_bytes() - before > 60 * LARGE_PAGE
    del memory
    assert float(part[-1]) != 0
    del part
    gc.collect()
    assert resident_bytes() - before < 4 * LARGE_PAGE
