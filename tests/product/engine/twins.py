"""Instruction sets that this processor lacks, by instructions of another name that do the same."""

from collections.abc import Sequence
from pathlib import Path

from buddy.engine.executors.native.instructions import InstructionSet, cpu_features

_AVX_VNNI = """
#include <immintrin.h>
#undef __AVX512F__
#undef __AVX512BW__
#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32
"""


def runnable(known_set: InstructionSet, folder: Path) -> Sequence[str] | None:
    """The flags that compile for a set or its twin; None where this processor has neither.

    AVX-VNNI is AVX-512 VNNI in registers of 256 bits, in another encoding.
    """
    if known_set.needs <= cpu_features():
        return known_set.flags
    if known_set.name != "avx_vnni" or not {"avx512_vnni", "avx512vl"} <= cpu_features():
        return None
    header = folder / "avx_vnni.h"
    header.write_text(_AVX_VNNI)
    return ("-march=x86-64-v3", "-mavx512vnni", "-mavx512vl", "-include", str(header))
