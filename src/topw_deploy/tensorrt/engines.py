"""The engines of a folder: which fits this machine, and why the others do not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from topw_deploy.errors import TensorRTError
from topw_deploy.files import NotRegularError, open_regular
from topw_deploy.manifest import sha256_of_stream
from topw_deploy.plugins import driver
from topw_deploy.tensorrt.stamp import ENGINE_SUFFIX, FOLDER, STAMP_SUFFIX, TensorRTStamp, manifest_hash, read


@dataclass(frozen=True)
class Machine:
    """The machine that an engine must fit. sm: 87 for sm_87."""

    tensorrt: str
    gpu: str
    sm: int


def this_machine(tensorrt_version: str, device: int = 0) -> Machine:
    """The machine with GPU number `device`. Raises TensorRTError if there is none."""
    seen = driver.query_driver()
    if not 0 <= device < len(seen.devices):
        reason = seen.why_none or f"device {device} was requested, but there are {len(seen.devices)} GPUs"
        raise TensorRTError(f"no engine can be built or run here: {reason}; see `topw plugins show`.")
    gpu = seen.devices[device]
    return Machine(tensorrt_version, gpu.name, gpu.architecture)


def misplaced(out: Path) -> str | None:
    """Why the folder's `engines` is ignored, as a clause after its name, or None."""
    path = out / FOLDER
    if path.is_symlink():
        return "is a symbolic link, but engines must be in the folder itself"
    return "is not a folder" if path.exists() and not path.is_dir() else None


def stamps(out: Path) -> list[Path]:
    return _named(out, STAMP_SUFFIX)


def unfinished(out: Path) -> list[Path]:
    """Engines without a stamp: their builds did not finish."""
    stamped = {path.with_suffix(ENGINE_SUFFIX) for path in stamps(out)}
    return [path for path in _named(out, ENGINE_SUFFIX) if path not in stamped]


def _named(out: Path, suffix: str) -> list[Path]:
    return [] if misplaced(out) else sorted((out / FOLDER).glob(f"*{suffix}"))


def has_engines(out: Path) -> bool:
    """Whether there is any engine, finished or not."""
    return bool(stamps(out) or unfinished(out))


def fitting(out: Path, machine: Machine) -> tuple[Path, TensorRTStamp]:
    """An intact engine for `machine`, and its stamp. Raises TensorRTError with the reasons if none."""
    reasons = []
    for path in stamps(out):
        try:
            stamp = read(path)
        except TensorRTError as error:
            reasons.append(str(error).rstrip("."))
            continue
        engine = path.with_name(stamp.engine)
        reason = misfit(stamp, out, machine) or damage(engine, stamp)
        if not reason:
            return engine, stamp
        reasons.append(f"{FOLDER}/{stamp.engine} {reason}")
    if reason := misplaced(out):
        reasons.append(f"{FOLDER} {reason}")
    reasons += [f"{FOLDER}/{path.name} has no stamp, as after an interrupted build" for path in unfinished(out)]
    raise TensorRTError(f"{'; '.join(reasons) or f'{out} has no engine'}; build one with `topw build-engine {out}`.")


def misfit(stamp: TensorRTStamp, out: Path, machine: Machine) -> str | None:
    """Why the stamp does not fit, as a clause after the engine's name, or None."""
    if stamp.manifest != manifest_hash(out):
        return "was built from another export than this folder's"
    if stamp.tensorrt != machine.tensorrt:
        return f"was built by TensorRT {stamp.tensorrt}, but this is {machine.tensorrt}"
    if (stamp.gpu, stamp.sm) != (machine.gpu, machine.sm):
        return f"was built for {stamp.gpu} (sm_{stamp.sm}), but this is {machine.gpu} (sm_{machine.sm})"
    return None


def damage(engine: Path, stamp: TensorRTStamp) -> str | None:
    """Why the file differs from its stamp, as a clause after its name, or None. Reads the whole file."""
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
