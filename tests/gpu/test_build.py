"""Parsing cuobjdump and ptxas output."""

from __future__ import annotations

from benchmarks.gpu import build

USAGE = """Resource usage:
 Common:
  GLOBAL:0
 Function _ZN4topw7certifyINS_8Bfloat16EEEvNS_4CallE:
  REG:56 STACK:16 SHARED:6656 LOCAL:0 CONSTANT[0]:936 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _ZN4topw8geometryENS_4CallE:
  REG:128 STACK:728 SHARED:4496 LOCAL:0 CONSTANT[0]:936 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN4topw8geometryENS_4CallE' for 'sm_90'
ptxas info    : Function properties for _ZN4topw8geometryENS_4CallE
    728 bytes stack frame, 84 bytes spill stores, 152 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers
"""


def test_registers_stack_and_shared_memory_are_read_by_kernel() -> None:
    assert build.parse_usage(USAGE) == {
        "certify<Bfloat16>": {"registers": 56, "stack": 16, "shared": 6656},
        "geometry": {"registers": 128, "stack": 728, "shared": 4496},
    }


def test_spills_are_read_by_kernel() -> None:
    assert build.parse_spills(PTXAS) == [("_ZN4topw8geometryENS_4CallE", 84, 152)]


def test_names_of_kernels_are_readable() -> None:
    assert build.plain_name("_ZN4topw7certifyIfEEvNS_4CallE") == "certify<float>"
    assert build.plain_name("_ZN4topw4massENS_4CallEi") == "mass"
    assert build.plain_name("other") == "other"
