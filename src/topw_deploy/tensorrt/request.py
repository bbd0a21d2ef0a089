"""A request to build an engine, checked before TensorRT is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from topw_deploy.errors import ParameterError, TensorRTError
from topw_deploy.manifest import DecoderManifest, load_manifest
from topw_deploy.tensorrt.profiles import KINDS, Profile, make_profiles

DEFAULT_SEQUENCE = 1024
"""Tokens of a row per run. Longer chunks take more memory and are not faster."""


@dataclass(frozen=True, kw_only=True)
class TensorRTRequest:
    """The engine to build.

    out: a folder exported for TensorRT.
    max_batch: maximum number of rows per run.
    max_sequence: maximum number of tokens of a row per run; None for min(1,024, the cache's length).
    max_edits: maximum number of logit edits of a row; None for the cache's length.
    profile: one of profiles.KINDS.
    fp16: let a float32 decoder run in half precision.
    workspace: bytes of scratch memory; None for TensorRT's choice.
    timing_cache: a file to read and update; None for no file.
    plugin: "auto", "python", "none", or a library's path.

    Raises ParameterError for an invalid field.
    """

    out: Path
    max_batch: int = 1
    max_sequence: int | None = None
    max_edits: int | None = None
    profile: str = "both"
    fp16: bool = False
    workspace: int | None = None
    timing_cache: Path | None = None
    plugin: str = "auto"

    def __post_init__(self) -> None:
        if self.profile not in KINDS:
            raise ParameterError(f"profile is {self.profile!r}, but must be one of {', '.join(KINDS)}.", "profile")
        if self.workspace is not None and self.workspace < 1:
            raise ParameterError(f"workspace is {self.workspace}, but must be at least 1 byte.", "workspace")
        if self.timing_cache is not None and not self.timing_cache.parent.is_dir():
            raise ParameterError(
                f"timing_cache is {self.timing_cache}, but {self.timing_cache.parent} is not a folder.", "timing_cache"
            )
        if self.fp16 and self.plugin == "none":
            raise ParameterError(
                "fp16 would compute the sampler's function in half precision, too; build with the plugin, or export "
                "with --dtype fp16, which leaves the sampler as it is.",
                "fp16",
            )

    def profiles(self, cache_length: int) -> tuple[Profile, ...]:
        """The profiles for a cache of `cache_length` tokens. Raises ParameterError for a bound that does not fit."""
        sequence = self.max_sequence or min(DEFAULT_SEQUENCE, cache_length)
        if sequence > cache_length:
            raise ParameterError(
                f"max_sequence is {sequence}, but the cache of this export holds {cache_length} tokens; give at most "
                "that, or export with a larger --max-length.",
                "max_sequence",
            )
        return make_profiles(
            self.profile,
            max_batch=self.max_batch,
            max_sequence=sequence,
            max_edits=cache_length if self.max_edits is None else self.max_edits,
        )


def load_buildable(out: Path) -> tuple[DecoderManifest, int]:
    """Returns (manifest of the folder `out`, its cache's length in tokens).

    Raises ManifestError, and TensorRTError if no engine can be built of the folder.
    """
    manifest = load_manifest(out)
    if manifest.verification.status == "provisional":
        raise TensorRTError(f"{out} is an export whose verification did not finish; export the model again.")
    if not isinstance(manifest, DecoderManifest):
        raise TensorRTError(
            f"{out} holds only a sampler, but this command builds decoders; use trtexec or another program."
        )
    decoder = manifest.decoder
    if decoder.target != "tensorrt" or decoder.kv_form != "static" or not decoder.ragged_chunks:
        raise TensorRTError(
            f"{out} was exported for {decoder.target} with a {decoder.kv_form} cache; export with --target tensorrt "
            "--kv static --max-length N."
        )
    if decoder.recurs:
        raise TensorRTError(
            f"{out} has convolution or recurrent states, which an engine cannot update in place: TensorRT promises "
            "that only for keys and values; run the export with onnxruntime."
        )
    pasts = {state.past for state in decoder.states}
    lengths = {spec.shape[2] if len(spec.shape) == 4 else None for spec in manifest.inputs if spec.name in pasts}
    fixed = [size for size in lengths if isinstance(size, int)]
    if len(lengths) != 1 or not fixed:
        raise TensorRTError(f"the cache of {out} has no fixed length; export for TensorRT without --max-length 0.")
    return manifest, fixed[0]
