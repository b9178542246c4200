"""Finds the OpenMP that torch runs on, for the kernel to run on the same threads."""

import ctypes
import sys
from functools import cache
from pathlib import Path

import torch

from buddy.engine.executors.native import layout
from buddy.errors import ModelError


@cache
def openmp() -> layout.OpenMP:
    """The OpenMP that torch runs on: two teams of threads would spin on the same cores.

    Raises:
        ModelError: There is none with GNU's calls.
    """
    suffix = {"darwin": "dylib"}.get(sys.platform, "so")
    try:
        # A symbol is looked for in the library and in what it was linked with.
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"))
        calls = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        return layout.OpenMP(*(ctypes.cast(getattr(torch_cpu, c), ctypes.c_void_p) for c in calls))
    except (OSError, AttributeError) as error:
        raise ModelError(f"torch runs on no OpenMP that the kernel can call: {error}") from error
