"""The engines of an exported folder: finds the one that fits this machine, or says why none does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from topw_deploy.errors import TensorRTError
from topw_deploy.files import NotRegularError, open_regular
from topw_deploy.manifest import sha256_of_stream
from topw_deploy.plugins import driver
from topw_deploy.tensorrt.stamp import ENGINE_SUFFIX, FOLDER, STAMP_SUFFIX, TensorRTStamp, manifest_hash, read_stamp


@dataclass(frozen=True)
class EnginePlatform:
    """What an engine is built for and must be run with.

    tensorrt: version.
    gpu: name of the GPU.
    sm: architecture of the GPU; 87 for sm_87.
    """

    tensorrt: str
    gpu: str
    sm: int


def this_platform(tensorrt_version: str, device: int = 0) -> EnginePlatform:
    """The platform of GPU number `device` of this machine. Raises TensorRTError if there is no such GPU."""
    seen = driver.query_driver()
    if not 0 <= device < len(seen.devices):
        reason = seen.why_none or f"device {device} was requested, but there are {len(seen.devices)} GPUs"
        raise TensorRTError(f"no engine can be built or run here: {reason}; see `topw plugins show`.")
    gpu = seen.devices[device]
    return EnginePlatform(tensorrt_version, gpu.name, gpu.architecture)


def folder_problem(out: Path) -> str | None:
    """Why the folder's `engines` is not used, as a clause that follows its name; None if it can be used."""
    path = out / FOLDER
    if path.is_symlink():
        return "is a symbolic link, but engines must be in the folder itself"
    return "is not a folder" if path.exists() and not path.is_dir() else None


def stamp_paths(out: Path) -> list[Path]:
    """The files that may be stamps of engines, sorted."""
    return _files_ending_in(out, STAMP_SUFFIX)


def unfinished_engines(out: Path) -> list[Path]:
    """Engines without a stamp, whose builds did not finish."""
    stamped = {path.with_suffix(ENGINE_SUFFIX) for path in stamp_paths(out)}
    return [path for path in _files_ending_in(out, ENGINE_SUFFIX) if path not in stamped]


def _files_ending_in(out: Path, suffix: str) -> list[Path]:
    return [] if folder_problem(out) else sorted((out / FOLDER).glob(f"*{suffix}"))


def has_engines(out: Path) -> bool:
    """Whether the folder has any engine, finished or not."""
    return bool(stamp_paths(out) or unfinished_engines(out))


def find_fitting_engine(out: Path, platform: EnginePlatform) -> tuple[Path, TensorRTStamp]:
    """Returns (an intact engine for `platform`, its stamp). Raises TensorRTError with the reasons if there is none."""
    reasons = []
    for path in stamp_paths(out):
        try:
            stamp = read_stamp(path)
        except TensorRTError as error:
            reasons.append(str(error).rstrip("."))
            continue
        engine = path.with_name(stamp.engine)
        reason = misfit_reason(stamp, out, platform) or damage_reason(engine, stamp)
        if not reason:
            return engine, stamp
        reasons.append(f"{FOLDER}/{stamp.engine} {reason}")
    if reason := folder_problem(out):
        reasons.append(f"{FOLDER} {reason}")
    reasons += [f"{FOLDER}/{path.name} has no stamp, as after an interrupted build" for path in unfinished_engines(out)]
    raise TensorRTError(f"{'; '.join(reasons) or f'{out} has no engine'}; build one with `topw build-engine {out}`.")


def misfit_reason(stamp: TensorRTStamp, out: Path, platform: EnginePlatform) -> str | None:
    """Why an engine with this stamp does not fit, as a clause that follows its name; None if it fits."""
    if stamp.manifest != manifest_hash(out):
        return "was built from another export than this folder's"
    if stamp.tensorrt != platform.tensorrt:
        return f"was built by TensorRT {stamp.tensorrt}, but this is {platform.tensorrt}"
    if (stamp.gpu, stamp.sm) != (platform.gpu, platform.sm):
        return f"was built for {stamp.gpu} (sm_{stamp.sm}), but this is {platform.gpu} (sm_{platform.sm})"
    return None


def damage_reason(engine: Path, stamp: TensorRTStamp) -> str | None:
    """How the engine differs from its stamp, as a clause that follows its name; None if it does not.

    Reads the whole file.
    """
    try:
        with open_regular(engine) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != stamp.size:
                return f"has {size} bytes, but its stamp states {stamp.size}: it was changed or truncated"
            found = sha256_of_stream(stream)
    except (FileNotFoundError, NotRegularError):
        return "is not a file in the folder"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None if found == stamp.sha256 else "does not have the SHA-256 of its stamp: it was changed"
