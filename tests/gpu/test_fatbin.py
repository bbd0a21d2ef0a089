"""Zeroing the GPU code of other architectures."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu.fatbin import fat_binaries, keep_only, loaded_code
from topw_deploy.errors import BenchmarkError, PluginError
from topw_deploy.plugins import nvcc

from .fatbin_files import CUBIN, ONLY_THERE, PTX, elf, entry, fat_binary

OLD, WANTED, NEW, TEXT = b"old" * 40, b"wanted!!" * 9, b"new code" * 11, b".version 9.0" * 4


@pytest.mark.parametrize(
    ("sm", "wanted"),
    [
        (90, ["sm_90"]),
        (89, ["sm_86"]),  # machine code runs on later architectures of its generation
        (80, ["sm_80"]),
        (75, ["compute_70"]),  # no machine code of the generation: PTX
        (121, ["compute_120"]),  # sm_120a runs only on sm_120
        (120, ["sm_120a"]),
        (61, []),
    ],
)
def test_the_driver_would_choose_what_is_kept(sm: int, wanted: list[str]) -> None:
    given = fat_binary(
        entry(CUBIN, 80, OLD), entry(CUBIN, 86, OLD), entry(CUBIN, 90, WANTED), entry(CUBIN, 120, NEW, ONLY_THERE),
        entry(PTX, 70, TEXT), entry(PTX, 120, TEXT),
    )  # fmt: skip
    (entries,) = fat_binaries(elf([(".nv_fatbin", given)]))
    assert [code.label for code in loaded_code(entries, sm)] == wanted


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not a library at all, but longer than a header" * 3, "not a 64-bit little-endian ELF"),
        (elf([(".nv_fatbin", fat_binary(entry(CUBIN, 90, WANTED)))])[:100], "ends within a header"),
        (elf([(".nv_fatbin", fat_binary(entry(3, 90, WANTED)))]), "of kind 3"),
        (elf([(".nv_fatbin", fat_binary(entry(CUBIN, 90, WANTED))[:-8])]), "its section at"),
        (elf([(".nv_fatbin", fat_binary(entry(CUBIN, 90, WANTED)[:-8]))]), "this layout is unknown"),
    ],
)
def test_a_broken_file_is_refused_and_not_changed(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "libbroken.so"
    path.write_bytes(content)
    with pytest.raises(BenchmarkError, match=rf"^libbroken\.so:? .*{reason}"):
        keep_only(path, 90)
    assert path.read_bytes() == content


@pytest.mark.slow
def test_a_library_of_nvcc_keeps_the_code_of_one_gpu(tmp_path: Path) -> None:
    try:
        compiler = nvcc.find_toolkit().nvcc
    except PluginError as error:
        pytest.skip(str(error))
    source, path = tmp_path / "add.cu", tmp_path / "libadd.so"
    source.write_text("__global__ void add(float *x) { x[threadIdx.x] += 1; }\n", encoding="ascii")
    code = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in (80, 90)]
    code += ["-gencode=arch=compute_90,code=compute_90"]
    subprocess.run([compiler, "-shared", "-Xcompiler=-fPIC", *code, str(source), "-o", str(path)], check=True)
    before = payloads(path)
    assert keep_only(path, 90).endswith("(sm_90)")
    after = payloads(path)
    assert set(before) == set(after) == {"sm_80", "sm_90", "compute_90"}
    assert after["sm_90"] == before["sm_90"]
    assert any(before["sm_80"])
    assert not any(after["sm_80"] + after["compute_90"])


def payloads(path: Path) -> dict[str, bytes]:
    """Payloads by architecture: nvcc's linking adds a fat binary."""
    data, found = path.read_bytes(), dict[str, bytes]()
    for entries in fat_binaries(data):
        for code in entries:
            found[code.label] = found.get(code.label, b"") + data[code.start : code.start + code.size]
    return found
