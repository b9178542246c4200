"""The instruction sets that the kernel is built for, and the best that this processor has.

A wheel carries a library for each set of its machine. Without one the compiler makes that of the
best set at first use. For other machines it makes what the compiler finds best there.

Macs call their machine arm64 and have no /proc/cpuinfo. What clang makes for them without a flag
runs on all of them; `-march=native`, not every clang knows there.
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from buddy.errors import ModelError

VARIABLE: Final = "BUDDY_NATIVE"
"""Environment variable: 0 = no kernel; a set's name = no better one than that."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What one library of the kernel is compiled for.

    Attributes:
        name: In file names, records and `BUDDY_NATIVE`.
        machine: As `platform.machine()` calls it.
        flags: Of GCC and Clang.
        needs: Features that a processor must have, as /proc/cpuinfo calls them.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_X86_V3: Final = "avx2 bmi1 bmi2 f16c fma abm movbe"
_X86_V4: Final = f"{_X86_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
_VNNI: Final = f"{_X86_V4} avx512_vnni"
_WIDE: Final = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_BYTES: Final = (*_WIDE, "-mavx512vnni")
_DOTS: Final = (*_BYTES, "-mavx512bf16")
_TILES: Final = (*_DOTS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")


def _x86(name: str, needs: str, *flags: str) -> InstructionSet:
    return InstructionSet(name, "x86_64", flags, frozenset(needs.split()))


SETS: Final = (
    _x86("amx", f"{_VNNI} avx512_bf16 amx_tile amx_bf16 amx_int8", *_TILES),
    _x86("avx512_bf16", f"{_VNNI} avx512_bf16", *_DOTS),
    _x86("avx512_vnni", _VNNI, *_BYTES),
    _x86("avx512", _X86_V4, *_WIDE),
    _x86("avx_vnni", f"{_X86_V3} avx_vnni", "-march=x86-64-v3", "-mavxvnni"),
    _x86("avx2", _X86_V3, "-march=x86-64-v3"),
    InstructionSet(
        "neon_dot", "aarch64", ("-march=armv8.2-a+dotprod",), frozenset({"asimd", "asimddp"})
    ),
    InstructionSet("neon", "aarch64", ("-march=armv8-a",), frozenset({"asimd"})),
    InstructionSet("neon", "arm64", (), frozenset()),
)
"""All sets; those of one machine stand together, the best first."""


def sets_of(machine: str) -> tuple[InstructionSet, ...]:
    """The sets of a machine, the best first; none of one that no library is built for."""
    return tuple(known for known in SETS if known.machine == machine)


def best_set() -> InstructionSet:
    """The best set that this processor has and `BUDDY_NATIVE` allows.

    Raises:
        ModelError: `BUDDY_NATIVE` forbids the kernel, or names a set that this processor lacks.
    """
    machine, features = platform.machine(), cpu_features()
    available = [known for known in sets_of(machine) if known.needs <= features]
    allowed = os.environ.get(VARIABLE, "")
    if allowed == "0":
        raise ModelError(f"{VARIABLE}=0 is set")
    if not allowed:
        native = InstructionSet("native", machine, ("-march=native",), features)
        return available[0] if available else native
    for known in available:
        if known.name == allowed:
            return known
    names = ", ".join(known.name for known in available) or "none that has a name"
    raise ModelError(
        f"{VARIABLE}={allowed} names no instruction set of this processor; it has: {names}"
    )


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16; True where Linux is silent.

    Without them torch multiplies bfloat16 several times as slowly as float32.
    """
    features = cpu_features()
    is_known = platform.machine() == "x86_64" and bool(features)
    return not is_known or bool(features & {"avx512_bf16", "avx_ne_convert", "amx_bf16"})


def cpu_features() -> frozenset[str]:
    """What this processor can do, as Linux says; nothing elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else ():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
