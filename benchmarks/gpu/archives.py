"""Packed components for a GPU host: a folder as .tar.xz, unpacked beside the results.

A component NAME is packed as pack-NAME.tar.xz and unpacked to PACKED/pack-NAME. All folders there come before installed
packages; libraries are in their subfolder LIBRARIES.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from topw_deploy.errors import BenchmarkError

SUFFIX = ".tar.xz"
LIBRARIES = "rtx"
"""The subfolder for LD_LIBRARY_PATH."""

_LARGEST_DICTIONARY, _SMALLEST_DICTIONARY = 192 << 20, 1 << 16  # bytes; a GPU library compresses as one block


def write(tree: Path, archive: Path) -> None:
    """Write the files and links in `tree`, sorted and without times and owners; the same files give the same bytes."""
    size = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    dictionary = min(max(size, _SMALLEST_DICTIONARY), _LARGEST_DICTIONARY)
    lzma2 = {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary}
    filters: list[dict[str, Any]] = [{"id": lzma.FILTER_X86}, lzma2]

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime = member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with (
        lzma.open(archive, "wb", format=lzma.FORMAT_XZ, filters=filters) as stream,
        tarfile.open(fileobj=stream, mode="w") as tar,
    ):
        for path in sorted(tree.iterdir()):
            tar.add(path, arcname=path.name, filter=anonymous)


def unpack(archives: Sequence[Path], packed: Path) -> None:
    """Unpack the archives that `packed` does not have yet.

    Raises BenchmarkError for an unreadable archive, or for a member outside its folder; earlier ones stay unpacked.
    """
    packed.mkdir(parents=True, exist_ok=True)
    for archive in archives:
        folder = packed / archive.name.removesuffix(SUFFIX)
        stamp, scratch = folder.with_name(f"{folder.name}.sha256"), folder.with_name(f".{folder.name}")
        try:
            with open(archive, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if stamp.is_file() and stamp.read_text("ascii") == digest:
                continue
            shutil.rmtree(scratch, ignore_errors=True)
            with lzma.open(archive) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
                tar.extractall(scratch, filter="data")
        except (OSError, tarfile.TarError, lzma.LZMAError, EOFError) as error:
            raise BenchmarkError(f"{archive} cannot be unpacked ({error}); copy it again, or pack again.") from None
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
        stamp.write_text(digest, "ascii")


def components(packed: Path) -> list[Path]:
    """The unpacked folders."""
    return sorted(stamp.with_suffix("") for stamp in packed.glob("*.sha256"))


def environment(packed: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with PYTHONPATH and LD_LIBRARY_PATH of the unpacked folders before all others.

    Adds the CUDA library folders of this Python (`nvidia/cu13/lib` and so on), as onnxruntime finds CUDA through the
    loader.
    """
    folders, found = components(packed), dict(base)
    spec = find_spec("nvidia") if folders else None
    places = [] if spec is None else spec.submodule_search_locations or []
    libraries = [folder / LIBRARIES for folder in folders if (folder / LIBRARIES).is_dir()]
    libraries += [path for place in places for path in sorted(Path(place).glob("*/lib"))]
    for variable, paths in (("PYTHONPATH", folders), ("LD_LIBRARY_PATH", libraries)):
        if paths:
            before = [base[variable]] if base.get(variable) else []
            found[variable] = os.pathsep.join([*(str(path.absolute()) for path in paths), *before])
    return found
