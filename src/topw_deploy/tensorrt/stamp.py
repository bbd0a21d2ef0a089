"""An engine's stamp, and the engine of a folder that fits this machine.

An engine is code for one GPU model and one TensorRT version, and may be deserialized only if its stamp fits. The stamp
is a JSON file beside the engine with the engine's source, platform and hash. It is written last, so an engine without a
stamp is unfinished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from topw_deploy.errors import ParameterError, TensorRTError
from topw_deploy.folders import NotRegularError, atomic_file, open_regular, read_bounded
from topw_deploy.manifest import MANIFEST_NAME, TensorSpec, sha256_of, sha256_of_stream
from topw_deploy.plugins import library

FOLDER = "engines"
ENGINE_SUFFIX, STAMP_SUFFIX = ".engine", ".json"
_MAX_BYTES = 1 << 20  # a stamp has about 2 KB; a hostile file must not fill the memory

_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Line = Annotated[str, Meta(pattern=r"^[ -~]*\Z")]
_Int32 = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Int64 = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class TensorRTStamp(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stamp's fields.

    engine: name of the engine's file in engines/.
    size, sha256: bytes and hash of that file.
    manifest: SHA-256 of the folder's manifest.
    tensorrt, gpu, sm: the platform; sm is 87 for sm_87.
    plugin: version of the sampler's plugin; "" for the graph's function.
    cache_length: tokens.
    workspace: bytes of scratch memory; None for no limit.
    topw_deploy: version of this package.
    """

    engine: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.engine\Z")]
    size: _Int64
    sha256: _Sha256
    manifest: _Sha256
    tensorrt: _Line
    gpu: _Line
    sm: _Int32
    plugin: _Line
    cache_length: _Int32
    profiles: Annotated[tuple[Profile, ...], Meta(min_length=1)]
    workspace: _Int64 | None
    topw_deploy: _Line
    format_version: Literal[1]

    @property
    def most(self) -> tuple[int, int, int]:
        """The largest numbers of rows, of tokens of a row and of edits of a row that a profile allows."""
        batch, sequence, edits = (
            max(getattr(profile, axis).most for profile in self.profiles) for axis in ("batch", "sequence", "edits")
        )
        return batch, sequence, edits


def read_stamp(path: Path) -> TensorRTStamp:
    """Read and check a stamp. Raises TensorRTError for a file that is not readable or not a stamp."""
    try:
        return msgspec.json.decode(read_bounded(path, _MAX_BYTES), type=TensorRTStamp)
    except NotRegularError:
        raise TensorRTError(f"{path} is not an engine's stamp (it is not a file in the folder).") from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise TensorRTError(f"{path} is not an engine's stamp ({error}).") from None
    except OSError as error:
        raise TensorRTError(f"{path} cannot be read: {error.strerror or error}.") from None


def write_stamp(folder: Path, stamp: TensorRTStamp) -> None:
    """Write the stamp atomically beside its engine."""
    with atomic_file((folder / stamp.engine).with_suffix(STAMP_SUFFIX)) as stream:
        stream.write(msgspec.json.format(msgspec.json.encode(stamp), indent=2) + b"\n")


@dataclass(frozen=True)
class EnginePlatform:
    """What an engine is built for: a TensorRT version, and a GPU by name and architecture (87 for sm_87)."""

    tensorrt: str
    gpu: str
    sm: int


def this_platform(tensorrt_version: str, device: int = 0) -> EnginePlatform:
    """The platform of GPU number `device` of this machine. Raises TensorRTError if there is no such GPU."""
    seen = library.query_driver()
    if not 0 <= device < len(seen.devices):
        reason = seen.why_none or f"device {device} was requested, but there are {len(seen.devices)} GPUs"
        raise TensorRTError(f"no engine can be built or run here: {reason}; see `topw doctor`.")
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
        reason = _misfit_reason(stamp, out, platform) or _damage_reason(engine, stamp)
        if not reason:
            return engine, stamp
        reasons.append(f"{FOLDER}/{stamp.engine} {reason}")
    if reason := folder_problem(out):
        reasons.append(f"{FOLDER} {reason}")
    reasons += [f"{FOLDER}/{path.name} has no stamp, as after an interrupted build" for path in unfinished_engines(out)]
    raise TensorRTError(f"{'; '.join(reasons) or f'{out} has no engine'}; build one with `topw build-engine {out}`.")


def _misfit_reason(stamp: TensorRTStamp, out: Path, platform: EnginePlatform) -> str | None:
    """Why an engine with this stamp does not fit, as a clause that follows its name; None if it fits."""
    if stamp.manifest != sha256_of(out / MANIFEST_NAME):
        return "was built from another export than this folder's"
    if stamp.tensorrt != platform.tensorrt:
        return f"was built by TensorRT {stamp.tensorrt}, but this is {platform.tensorrt}"
    if (stamp.gpu, stamp.sm) != (platform.gpu, platform.sm):
        return f"was built for {stamp.gpu} (sm_{stamp.sm}), but this is {platform.gpu} (sm_{platform.sm})"
    return None


def _damage_reason(engine: Path, stamp: TensorRTStamp) -> str | None:
    """How the engine differs from its stamp, as a clause that follows its name; None if it does not.

    Reads the whole file.
    """
    try:
        with open_regular(engine) as stream:
            found = sha256_of_stream(stream)
    except (FileNotFoundError, NotRegularError):
        return "is not a file in the folder"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None if found == stamp.sha256 else "does not have the SHA-256 of its stamp: it was changed"


KINDS = ("both", "decode", "prefill")
_USUAL_EDITS = 16  # slots that the runtime allocates first
_EDITS = ("edit_ids", "edit_penalty", "edit_bias")
_Size = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Range(Struct, frozen=True, forbid_unknown_fields=True):
    """The bounds of a dimension, and the size that it is tuned for: TensorRT's min, opt and max."""

    least: _Size
    usual: _Size
    most: _Size

    def __post_init__(self) -> None:
        if not self.least <= self.usual <= self.most:
            raise ValueError(f"the range {self.least}, {self.usual}, {self.most} is not ascending")

    def __contains__(self, value: int) -> bool:
        return self.least <= value <= self.most


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """An optimization profile.

    name: "decode" or "prefill".
    batch: number of rows.
    sequence: number of new tokens of each row.
    edits: number of logit edits of each row.
    """

    name: str
    batch: Range
    sequence: Range
    edits: Range

    def shapes(self, spec: TensorSpec, words: int) -> tuple[list[int], list[int], list[int]]:
        """The min, opt and max shapes of input `spec`. Raises TensorRTError for an unknown dimension.

        words: number of words of a row's mask of allowed tokens. An engine always takes whole masks.
        """
        ranges = [self._range(spec, axis, words) for axis in range(len(spec.shape))]
        return [r.least for r in ranges], [r.usual for r in ranges], [r.most for r in ranges]

    def _range(self, spec: TensorSpec, axis: int, words: int) -> Range:
        dimension = spec.shape[axis]
        if isinstance(dimension, int):
            return Range(dimension, dimension, dimension)
        if axis == 0:
            return self.batch
        if axis == 1 and spec.name == "input_ids":
            return self.sequence
        if axis == 1 and spec.name in _EDITS:
            return self.edits
        if axis == 1 and spec.name == "allowed":
            return Range(words, words, words)
        raise TensorRTError(
            f"input {spec.name} has the dimension {dimension!r}, for which an engine has no bounds; "
            "export with --target tensorrt and --max-length."
        )


def make_profiles(kind: str, *, max_batch: int, max_sequence: int, max_edits: int) -> tuple[Profile, ...]:
    """The profiles of an engine, in the order in which `find_profile` tries them.

    kind: "decode" (prompts run token by token), "prefill" (tuned for prompts; also decodes) or "both".

    Raises ParameterError for another kind or a bound below 1.
    """
    if kind not in KINDS:
        raise ParameterError(f"profile is {kind!r}, but must be one of {', '.join(KINDS)}.", "profile")
    for name, value in (("max_batch", max_batch), ("max_sequence", max_sequence), ("max_edits", max_edits)):
        if value < 1:
            raise ParameterError(f"{name} is {value!r}, but must be an integer >= 1.", name)
    batch = Range(1, max_batch, max_batch)
    edits = Range(0, min(_USUAL_EDITS, max_edits), max_edits)  # no edits: an empty tensor
    decode = Profile("decode", batch, Range(1, 1, 1), edits)
    prefill = Profile("prefill", batch, Range(1, max_sequence, max_sequence), edits)
    return {"both": (decode, prefill), "decode": (decode,), "prefill": (prefill,)}[kind]


def find_profile(available: Sequence[Profile], batch: int, sequence: int, edits: int) -> int | None:
    """Index of the first profile that covers a run of this shape; None if none does."""
    for index, profile in enumerate(available):
        if batch in profile.batch and sequence in profile.sequence and edits in profile.edits:
            return index
    return None
