"""Optimization profiles: the shapes that an engine accepts and those that it is tuned for.

- decode: one new token per row
- prefill: a chunk of the prompts
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from topw_deploy.errors import ParameterError, TensorRTError
from topw_deploy.manifest import TensorSpec

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
