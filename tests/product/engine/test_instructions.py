"""Every instruction set computes the same, here or emulated; the best that is there is taken."""

import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.engine.executors.native import compiler, instructions
from buddy.engine.executors.native.decoder import NativeDecoder
from buddy.engine.executors.native.instructions import SETS, best_set, cpu_features, sets_of
from buddy.errors import ModelError
from tests.product.engine.schedules import Schedule
from tests.product.engine.test_lanes import follow
from tests.product.engine.twins import runnable
from tests.tiny import every_kv_policy, tiny_model

every_set = pytest.mark.parametrize(
    "known_set", SETS, ids=lambda known_set: f"{known_set.name} of {known_set.machine}"
)
STEPS, NEIGHBOURS = (Path(__file__).with_name(f"{name}.c") for name in ("steps", "neighbours"))
CC = shlex.split(os.environ.get("CC", "cc"))  # `make sanitize` names one
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
NO_BYTE_DOTS = ("avx2", "avx512", "neon")
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")


def said(folder, source, cc, flags, run=()):
    """What a program prints, line by line."""
    program = folder / source.stem
    sources = Path(compiler.__file__).parent
    flags = [*(flag for flag in flags if flag not in ("-shared", "-fPIC")), f"-I{sources}"]
    subprocess.run([*cc, *flags, source, "-o", program, "-lm"], check=True, capture_output=True)
    done = subprocess.run([*run, program], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def printed(folder, cc, flags, run=()):
    """What the steps are, compiled in one way: by case, the residuals and logits of each."""
    cases = {}
    for line in said(folder, STEPS, cc, flags, run):
        first, *numbers = line.split()
        if first == "format":
            values = cases[line] = []
        else:
            values.append(torch.tensor(list(map(float, numbers))))
    return cases


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The steps without any optimisation, by the plain loops of matrix.h: floats, none rounded."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    return printed(
        tmp_path_factory.mktemp("plain"), CC, ["-O0", "-std=gnu11", "-pthread", "-DPLAIN=1"]
    )


def how_to_run(known_set, folder):
    """A set's compiler, flags and emulator; skips where it cannot run."""
    cc, run = CC, ()
    if known_set.machine == "aarch64" and platform.machine() != "aarch64":
        cc, run = (CROSS,), EMULATOR
        if shutil.which(CROSS) is None or shutil.which(run[0]) is None:
            pytest.skip(f"needs {CROSS} and {run[0]}")
    elif known_set.machine != platform.machine() or runnable(known_set, folder) is None:
        pytest.skip(f"this processor lacks {known_set.name}")
    return cc, [*compiler.FLAGS, *(runnable(known_set, folder) or known_set.flags)], run


@every_set
def test_a_product_of_few_bits_does_not_depend_on_vectors_beside_it(known_set, tmp_path):
    cc, flags, run = how_to_run(known_set, tmp_path)
    assert said(tmp_path, NEIGHBOURS, cc, flags, run) == 45 * ["0"]


@needs_cc
def test_nor_does_it_in_plain_c(tmp_path):
    assert said(tmp_path, NEIGHBOURS, CC, compiler.FLAGS) == 45 * ["0"]


@every_set
def test_steps_are_those_of_plain_c(known_set, plain, tmp_path):
    cc, flags, run = how_to_run(known_set, tmp_path)
    if known_set == best_set():  # all other tests run what these flags make of it
        flags.append("-O1")
    found = printed(tmp_path, cc, flags, run)
    assert list(found) == list(plain)
    assert len(found) == 40
    for case, expected in plain.items():
        # In bfloat16 a last bit may fall the other way; dot products of it also round one side, and
        # without dot products of bytes int4 meets vectors in bytes.
        exact = 1e-5 if "bf16 0" in case else 5e-3
        if "bf16 1" in case and "avx512_bf16" in known_set.needs:
            exact = 4e-2
        elif "bf16 1" in case and known_set.name in NO_BYTE_DOTS and case[7] in "356":
            exact = 8e-2
        for made, right in zip(found[case], expected, strict=True):
            assert made.isfinite().all()
            assert (made - right).abs().max() <= exact * right.abs().max()


@needs_cc
@pytest.mark.parametrize(
    "known_set", sets_of(platform.machine()), ids=lambda known_set: known_set.name
)
@every_kv_policy
@torch.no_grad()
def test_lanes_with_plans_of_their_own_equal_the_reference(monkeypatch, known_set, kv_policy):
    if not known_set.needs <= cpu_features():
        pytest.skip(f"this processor lacks {known_set.name}")
    monkeypatch.setenv("BUDDY_NATIVE", known_set.name)
    buddy = BuddyForCausalLM(tiny_model("qwen2"))
    native = NativeDecoder(buddy.backbone)
    assert native.library.instructions == known_set.name
    assert len(follow(Schedule(buddy, kv_policy, seed=6, executors=(native,)), 8)) > 8


def pretend(monkeypatch, machine, features):
    monkeypatch.delenv("BUDDY_NATIVE", raising=False)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(instructions, "cpu_features", lambda: frozenset(features))


@every_set
def test_the_best_that_a_processor_has_is_taken(monkeypatch, known_set):
    pretend(monkeypatch, known_set.machine, known_set.needs)
    assert best_set() == known_set
    sets = sets_of(known_set.machine)
    for less in sets[sets.index(known_set) :]:
        if not less.needs <= known_set.needs:
            continue
        monkeypatch.setenv("BUDDY_NATIVE", less.name)
        assert best_set() == less
    monkeypatch.delenv("BUDDY_NATIVE")
    for feature in known_set.needs:
        pretend(monkeypatch, known_set.machine, known_set.needs - {feature})
        assert best_set() != known_set


@pytest.mark.parametrize(("machine", "had"), [("x86_64", "avx2"), ("riscv64", "none that has")])
def test_a_set_that_is_not_there_is_refused(monkeypatch, machine, had):
    pretend(monkeypatch, machine, next(known for known in SETS if known.name == "avx2").needs)
    monkeypatch.setenv("BUDDY_NATIVE", "amx")
    with pytest.raises(ModelError, match=f"names no instruction set of this processor.*{had}"):
        best_set()


def test_a_mac_gets_what_every_clang_makes_for_it(monkeypatch):
    pretend(monkeypatch, "arm64", ())
    assert (best_set().name, best_set().flags) == ("neon", ())


def test_a_processor_that_no_set_is_for_gets_what_its_compiler_finds_best(monkeypatch):
    pretend(monkeypatch, "riscv64", {"v"})
    assert best_set().flags == ("-march=native",)
