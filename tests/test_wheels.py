"""A wheel for one kind of machine brings its kernels: nothing is compiled where it is installed."""

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile

import pytest

from buddy.engine.executors.native.instructions import sets_of
from tests.test_docs import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the wheels are for Linux")
COMPILERS = {"x86_64": ("x86_64-linux-gnu-gcc", "cc"), "aarch64": ("aarch64-linux-gnu-gcc", "cc")}
BUILD = "import sys; from hatchling import build; print(build.build_wheel(sys.argv[1]))"
RUN = """
import json
import torch
from buddy.engine.executors.native.compiler import find_compiler
from buddy.engine.executors.native.library import native_library
from buddy.errors import ModelError
from tests.tiny import random_ids, tiny_buddy
import buddy
try:
    raise SystemExit(f"there is a compiler: {find_compiler()}")
except ModelError as error:
    assert "no C compiler was found" in str(error)
model = tiny_buddy()
model.generate(random_ids(1, 4), max_new_tokens=3, do_sample=False)
library = native_library()
print(json.dumps([model.executor.describe(), library.instructions, library.compile_s,
                  library.calls._name, buddy.__file__]))
"""


def build(machine, folder):
    """The wheel of a machine, built from this checkout."""
    pytest.importorskip("hatchling")
    own, other = COMPILERS[machine]
    compiler = other if machine == platform.machine() else own
    if shutil.which(compiler) is None or shutil.which("readelf") is None:
        pytest.skip(f"needs {compiler} and readelf")
    environment = {**os.environ, "BUDDY_KERNELS": machine, "CC": hasty(compiler, folder)}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, folder],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def hasty(compiler, folder):
    """A compiler that does not optimise: -O3 takes a minute, and what wheels carry needs none."""
    script = folder / compiler
    script.write_text(f'#!/bin/sh\nexec {shutil.which(compiler)} "$@" -O0\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize("machine", COMPILERS)
def test_a_wheel_carries_kernels_and_its_own_machine_needs_no_compiler(machine, tmp_path):
    wheel = build(machine, tmp_path)
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{machine}.whl")
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        machines = {archive.read(name)[18] for name in libraries}
    assert machines == {{"x86_64": 62, "aarch64": 183}[machine]}  # as ELF numbers them
    names = [name.rpartition("/")[2].partition("-")[0] for name in libraries]
    assert sorted(names) == sorted(instructions.name for instructions in sets_of(machine))
    if machine == platform.machine():
        check_installed(wheel, machine, tmp_path)


def check_installed(wheel, machine, tmp_path):
    place = tmp_path / "installed"
    (tmp_path / "empty").mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("CC", "BUDDY_NATIVE")},
        "PATH": str(tmp_path / "empty"),
        "PYTHONPATH": f"{place}:{ROOT}",
        "BUDDY_HOME": str(tmp_path / "home"),
    }
    install = ["-m", "pip", "install", "-q", "--no-deps", "--target", str(place), str(wheel)]
    for step in (install, ["-c", RUN]):
        command = [sys.executable, *step]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    engine, instructions, compile_s, path, package = json.loads(done.stdout)
    assert engine == f"native engine ({instructions})"
    assert instructions in {own.name for own in sets_of(machine)}
    assert compile_s is None
    assert path.startswith(str(place))
    assert package.startswith(str(place))
    assert not (tmp_path / "home").exists()
