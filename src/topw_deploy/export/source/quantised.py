"""Read checkpoints of quantised weights (docs/guide/quantisation.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy.errors import SourceError, UnsupportedModelError
from topw_deploy.export.source.files import EncodedWeight, IntegerMatrix, IntegerWeight, StoredTensor, stored_tensors
from topw_deploy.export.source.packed import PackedFormat, compressed_weights, has_integer_weights, packed_weights
from topw_deploy.export.source.scaled import mxfp4_weights, scaled_weights

_FLOAT8_METHODS = ("fp8", "fbgemm_fp8", "modelopt")
_SUPPORTED = (
    "GPTQ of 4 and 8 bits, AWQ of 4 bits (gemm), FP8, MXFP4, compressed-tensors of integers of 4 and 8 bits or floats"
    " of 8"
)


@dataclass(frozen=True)
class QuantisedFormat:
    """How a checkpoint's weights are quantised, as its configuration states.

    name: the format's name in messages.
    settings: the configuration's quantization_config.
    integers: whether the weights are integer codes, which a quantised export can keep.
    """

    name: str
    settings: dict[str, Any]
    integers: bool

    @property
    def blocks(self) -> tuple[int, int] | None:
        """The block size (rows, columns) of float8 weights that have a scale per block, else None."""
        groups = _object_or_empty(self.settings.get("config_groups"))
        weights = [_object_or_empty(_object_or_empty(group).get("weights")) for group in groups.values()]
        for found in (self.settings.get("weight_block_size"), *(part.get("block_structure") for part in weights)):
            if isinstance(found, list) and len(found) == 2 and all(isinstance(n, int) and n > 0 for n in found):
                return found[0], found[1]
        return None


class QuantisedCheckpoint:
    """The quantised weights of the checkpoint in `folder`.

    kind: the checkpoint's format.
    weights: name -> weight, which is decoded when it is read.
    Raises SourceError for missing tensors, wrong types or shapes.
    """

    def __init__(self, folder: Path, kind: QuantisedFormat) -> None:
        self.kind = kind
        stored = stored_tensors(folder)
        self.weights, used = _encoded_weights(kind, stored)
        used |= self.weights.keys()
        self._integer_weights = {name: each for name, each in self.weights.items() if isinstance(each, IntegerWeight)}
        self._others = {name: tensor for name, tensor in stored.items() if name not in used}

    @classmethod
    def of(cls, folder: Path) -> QuantisedCheckpoint | None:
        """Open the checkpoint in `folder`; None if its weights are not quantised."""
        kind = quantised_format(folder)
        return cls(folder, kind) if kind is not None else None

    def matrix(self, name: str) -> IntegerMatrix:
        """The codes, scales and zero points of the integer weight `name`."""
        return self._integer_weights[name].matrix()

    def matrices(self) -> Iterator[tuple[str, IntegerMatrix]]:
        """Yield the name and the matrix of every integer weight."""
        for name, weight in self._integer_weights.items():
            yield name, weight.matrix()

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of all tensors, those of quantised weights after decoding."""
        return [*(each.shape for each in self._others.values()), *(each.shape for each in self.weights.values())]

    def unread(self) -> dict[str, Any]:
        """Return every tensor by name as an UnreadTensor for transformers; quantised weights are float32."""
        from topw_deploy.export.source.unread_tensor import UnreadTensor

        stored: dict[str, StoredTensor | EncodedWeight] = {**self._others, **self.weights}
        return {name: UnreadTensor.of(tensor) for name, tensor in stored.items()}


def quantised_format(folder: Path) -> QuantisedFormat | None:
    """Return how the checkpoint in `folder` is quantised; None for ordinary weights.

    Raises UnsupportedModelError for unsupported quantisation, SourceError for a damaged configuration.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        settings = _quantisation_settings(config)
        if settings is None:
            return None
        method = str(settings.get("quant_method", "")).lower()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise SourceError(f"{folder / 'config.json'} is damaged ({error}); fetch it again.") from None
    if PackedFormat.of(settings) is not None:
        return QuantisedFormat(method.upper(), settings, integers=True)
    if method == "compressed-tensors":
        return QuantisedFormat(method, settings, has_integer_weights(settings, str(folder)))
    algorithm = str(settings.get("quant_algo", "fp8")).lower()  # only ModelOpt's configurations name one
    if method in _FLOAT8_METHODS and algorithm == "fp8":
        return QuantisedFormat("FP8", settings, integers=False)
    if method == "mxfp4":
        return QuantisedFormat("MXFP4", settings, integers=False)
    bits = settings.get("bits", settings.get("w_bit"))
    raise UnsupportedModelError(
        f"the checkpoint in {folder} is quantised by {method or 'an unnamed method'} ({bits} bits), but only "
        f"{_SUPPORTED} are supported; export the unquantised one."
    )


def _object_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _quantisation_settings(config: dict[str, Any]) -> Any:
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    stated = [part.get(name) for part in parts for name in ("quantization_config", "compression_config")]
    return next((found for found in stated if found is not None), None)


def _encoded_weights(
    kind: QuantisedFormat, stored: dict[str, StoredTensor]
) -> tuple[dict[str, EncodedWeight], set[str]]:
    packing = PackedFormat.of(kind.settings)
    if packing is not None:
        return packed_weights(stored, packing)
    if kind.name == "compressed-tensors":
        return compressed_weights(stored, kind.blocks)
    return mxfp4_weights(stored) if kind.name == "MXFP4" else scaled_weights(stored, kind.blocks)
