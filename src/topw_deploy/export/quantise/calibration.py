"""Round the weights of a torch model one product after the other, while it computes a text.

The model computes the text twice side by side: with its own weights, and with the rounded ones. Each product is rounded
for the inputs that it gets from the products before it, which are rounded already (see `feedback`), and so that its
outputs come nearer to those of the model's own weights. So the weights are read once, in the model's order.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from topw_deploy.errors import ParameterError, TopWError, UnsupportedModelError, one_line
from topw_deploy.export.quantise.blocks import WeightBlocks, check_finite, decode_blocks, pack_codes, row_digest
from topw_deploy.export.quantise.feedback import round_with_feedback
from topw_deploy.export.quantise.rounding import BUNDLED, Quantisation
from topw_deploy.export.source.checkpoint import load_during_calls
from topw_deploy.export.source.text_decoder import context_length
from topw_deploy.export.source.tokenizer import write_tokenizer
from topw_deploy.folders import read_bounded
from topw_deploy.progress import Progress
from topw_deploy.sampling.geometry import split_special_prefix
from topw_deploy.text import decimal_size

CALIBRATION_FILE = Path(__file__).with_name("calibration.txt")
"""The bundled text: prose, dialogues, code, data, logs and mathematics, in English and a dozen other languages."""
_COLUMNS = 512  # tokens in a row
_LARGEST_ROWS = 16
_LEAST_TEXT = 256  # tokens
_LARGEST_TEXT = 64 << 20  # bytes
_LEAST_TOKENS = 16  # experts that fewer tokens reach are rounded without the text
_LARGEST_IMPORTANCE = 10.0  # of a token, relative to the median
_MEASURED = 8  # one of so many tokens measures a product's error
_CORRECTED = 0.5  # the part of the errors before a product that its weight corrects: few tokens state all inexactly
_CORRECTION_DAMPING = 0.3  # of the Gram matrix, relative to its diagonal
_TINY = np.float32(np.finfo(np.float32).tiny)


def calibration_rows(tokenizer: Path, text: str, vocab_size: int, context_length: int) -> np.ndarray:
    """Encode `text` as rows of tokens, int64 [rows, columns], evenly spread over it.

    tokenizer: a tokenizer.json, whose leading special tokens each row gets.
    """
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(tokenizer)).encode(text)
    start, body = split_special_prefix(found.ids, found.special_tokens_mask, vocab_size)
    columns = max(1, min(_COLUMNS, context_length, len(start) + len(body)) - len(start))
    whole = body[: len(body) // columns * columns].reshape(-1, columns)
    chosen = whole[np.unique(np.linspace(0, len(whole) - 1, min(len(whole), _LARGEST_ROWS)).astype(int))]
    return np.hstack([np.tile(start, (len(chosen), 1)), chosen])


@dataclass(frozen=True)
class TextCalibration:
    """Rounds the rows of a model for the text of `scheme`.

    module: the torch model.
    tokenizer: the folder of its tokenizer.
    trust_remote_code: whether the tokenizer may run code of its own.
    """

    module: PreTrainedModel
    tokenizer: Path
    scheme: Quantisation
    trust_remote_code: bool
    progress: Progress

    def __call__(self, wanted: Mapping[bytes, int]) -> CalibratedRows:
        """Round the rows that `wanted` names by digest, each with its block size.

        Raises ParameterError for a text that cannot be read or is too short. See also `calibrate`.
        """
        rows = self._rows()
        if rows.size == 0:  # the model's tokenizer has no tokens for the bundled text
            return CalibratedRows()
        self.progress.say(f"Rounding the weights for {rows.size:,} tokens of text")
        with self.progress.bar(len(wanted), "rows") as advance:
            return calibrate(self.module, rows, wanted, self.scheme, advance)

    def _rows(self) -> np.ndarray:
        config = self.module.config
        sizes = config.get_text_config(decoder=True).vocab_size, context_length(config)
        text = _read_text(self.scheme.calibration)
        with tempfile.TemporaryDirectory() as scratch:
            folder = self.tokenizer
            if not (folder / "tokenizer.json").is_file():
                folder = Path(scratch)
                write_tokenizer(self.tokenizer, folder, trust_remote_code=self.trust_remote_code)
            rows = calibration_rows(folder / "tokenizer.json", text, *sizes)
        if rows.size < _LEAST_TEXT and self.scheme.calibration != BUNDLED:
            raise ParameterError(
                f"calibration is {self.scheme.calibration!r}, which has {rows.size} tokens, but needs at least "
                f"{_LEAST_TEXT}; give a longer text.",
                "calibration",
            )
        return rows


def _read_text(name: str) -> str:
    """The bundled text, or that of a file. Raises ParameterError for a file that cannot be read."""
    if name == BUNDLED:
        return CALIBRATION_FILE.read_text("utf-8")
    try:
        return read_bounded(Path(name), _LARGEST_TEXT, follow=True).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            f"calibration is {name!r}, which cannot be read ({one_line(error)}); give a text file in UTF-8 of at most "
            f"{decimal_size(_LARGEST_TEXT)}.",
            "calibration",
        ) from None


class _Matrix(NamedTuple):
    """A rounded matrix, and its mean error over the tokens: |rounded output - output|^2 / |output|^2."""

    data: WeightBlocks
    error: float


class CalibratedRows:
    """Rounded rows of a model's matrices, looked up by a digest of the original float row."""

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[_Matrix, int]] = {}

    def add(self, digests: Sequence[bytes], matrix: _Matrix) -> None:
        """Add a matrix, whose rows have these digests."""
        for row, digest in enumerate(digests):
            self._places.setdefault(digest, (matrix, row))

    def find(self, digests: Sequence[bytes]) -> tuple[WeightBlocks, float] | None:
        """Return the blocks of the rows with these digests, and their matrices' errors together; None if one lacks."""
        if not all(digest in self._places for digest in digests):
            return None
        by_matrix: dict[int, tuple[_Matrix, list[int], list[int]]] = {}
        for output, digest in enumerate(digests):
            matrix, row = self._places[digest]
            _, outputs, rows = by_matrix.setdefault(id(matrix), (matrix, [], []))
            outputs.append(output)
            rows.append(row)
        parts = list(by_matrix.values())
        order = np.argsort(np.concatenate([outputs for _, outputs, _ in parts]))

        def gather(place: int) -> np.ndarray:
            return np.concatenate([np.asarray(matrix.data[place])[rows] for matrix, _, rows in parts])[order]

        zeros = None if parts[0][0].data.zero_points is None else gather(2)
        return WeightBlocks(gather(0), gather(1), zeros), sum(matrix.error for matrix, _, _ in parts)


def calibrate(
    model: PreTrainedModel,
    rows: np.ndarray,
    wanted: Mapping[bytes, int],
    scheme: Quantisation,
    advance: Callable[[int], object],
) -> CalibratedRows:
    """Round the matrices of `model` for the text `rows`, int64 [rows, columns].

    wanted: digest of each row to be rounded -> block size; other rows stay float.
    advance: called with the number of rows that were rounded.

    Raises UnsupportedModelError if transformers cannot compute the model.
    """
    ids = torch.from_numpy(np.concatenate([rows, rows]))
    rounding = _Rounding(wanted, scheme, advance, ids.numel())
    head = model.get_output_embeddings()
    handle = None if head is None else head.register_forward_pre_hook(_stop)
    try:
        stopped = contextlib.suppress(_StopForwardError)
        with torch.no_grad(), load_during_calls(model), _looped_experts(model), stopped, rounding:
            model(input_ids=ids, use_cache=False)
    except TopWError:
        raise
    except Exception as error:  # a model's code may raise anything, and an operator may lack a float16 kernel
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot compute the calibration text ({one_line(error)}); use --calibration none."
        ) from error
    finally:
        if handle is not None:
            handle.remove()
    return rounding.found


@contextlib.contextmanager
def _looped_experts(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, each expert is a product of its own, in transformers' loop over experts."""
    name = "_experts_implementation_internal"
    settings = {id(module.config): vars(module.config) for module in model.modules() if hasattr(module, "config")}
    before = [(values, values[name]) for values in settings.values() if name in values]
    for values, _ in before:
        values[name] = "eager"
    try:
        yield
    finally:
        for values, implementation in before:
            values[name] = implementation


class _StopForwardError(Exception):
    """Ends the forward pass in front of the head, whose logits nothing needs."""


def _stop(*_call: Any) -> None:
    raise _StopForwardError


class _Rounding(TorchFunctionMode):
    """Inside the block, the second half of the batch computes with rounded matrices in place of wanted ones.

    Experts do so for all their tokens, because these are no longer in the batch's order.

    found: the matrices rounded so far.
    """

    def __init__(
        self, wanted: Mapping[bytes, int], scheme: Quantisation, advance: Callable[[int], object], tokens: int
    ) -> None:
        super().__init__()
        self.found = CalibratedRows()
        self._wanted, self._scheme, self._advance, self._tokens = wanted, scheme, advance, tokens

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        bias: Tensor | None = None
        if func is functional.linear:
            inputs, weight, bias = (*args, kwargs.get("bias"))[:3]
        elif func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and len(args) == 2 and args[1].dim() == 2:
            inputs, weight = args[0], args[1].T
        elif func is torch.addmm and len(args) == 3 and not kwargs:
            inputs, weight, bias = args[1], args[2].T, args[0]
        else:
            return func(*args, **kwargs)
        products = self._rounded_product(inputs, weight)
        if products is None:
            return func(*args, **kwargs)
        return (products if bias is None else products + bias).to(inputs.dtype)

    def _rounded_product(self, inputs: Tensor, weight: Tensor) -> Tensor | None:
        """The product with the weight [outputs, inputs]; None if it stays float, or too few tokens use it."""
        rows = weight.detach().float().contiguous().numpy()
        if row_digest(rows[0]) not in self._wanted:
            return None
        digests = [row_digest(row) for row in rows]
        sizes = {self._wanted.get(digest) for digest in digests}
        block_size = sizes.pop()
        tokens = inputs.detach().float().reshape(-1, inputs.shape[-1]).numpy()
        if block_size is None or sizes or len(tokens) < _LEAST_TOKENS or not np.isfinite(tokens).all():
            return None
        half = len(tokens) // 2 if len(tokens) == self._tokens else 0
        exact, own = tokens[:half] @ rows.T, tokens[half:]
        known = self.found.find(digests)
        if known is None:
            check_finite(rows)
            scale_type = np.dtype(np.float16 if weight.dtype == torch.float16 else np.float32)
            outputs = exact if half else own @ rows.T
            data = round_for_tokens(rows, tokens[:half], own, outputs, block_size, self._scheme, scale_type)
        else:  # a matrix that several layers share
            data = known[0]
        rounded = decode_blocks(data, self._scheme.bits, rows.shape[1])
        if known is None:
            some = own[::_MEASURED]
            errors = _squares(some @ (rounded - rows).T) / (_squares(some @ rows.T) + _TINY)
            self.found.add(digests, _Matrix(data, float(errors.mean())))
            self._advance(len(digests))
        products = np.concatenate([exact, own @ rounded.T])
        return torch.from_numpy(products.reshape(*inputs.shape[:-1], len(rows)))


def round_for_tokens(
    weight: np.ndarray,
    exact: np.ndarray,
    inputs: np.ndarray,
    outputs: np.ndarray,
    block_size: int,
    scheme: Quantisation,
    scale_type: np.dtype[Any],
) -> WeightBlocks:
    """Round `weight`, float32 [outputs, inputs], so that its products with `inputs` are near `outputs`.

    exact: the inputs of the model's own weights, [tokens, inputs], which give `outputs`; none if they are `inputs`.
    """
    factors = np.sqrt(_importance(outputs))[:, None]
    scaled = inputs * factors
    gram = scaled.T @ scaled
    if len(exact):
        weight = weight + np.float32(_CORRECTED) * _correction(weight, ((exact - inputs) * factors).T @ scaled, gram)
    codes, scales, zeros = round_with_feedback(weight, gram, block_size, scheme, scale_type)
    packed = pack_codes(codes, scheme.bits).reshape(*scales.shape, -1)
    return WeightBlocks(packed, scales, None if scheme.symmetric else pack_codes(zeros, scheme.bits))


def _correction(weight: np.ndarray, moved: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """What to add to `weight`, so that its products with the inputs are nearest to those with the exact ones (GPTAQ).

    moved: sum of (exact inputs - inputs)^T inputs.
    """
    damped = gram + np.diag(np.diagonal(gram) * np.float32(_CORRECTION_DAMPING) + _TINY)
    try:
        found = np.linalg.solve(damped, (weight @ moved).T).T
    except np.linalg.LinAlgError:
        return np.zeros_like(weight)
    return found if np.isfinite(found).all() else np.zeros_like(weight)


def _importance(outputs: np.ndarray) -> np.ndarray:
    """The factor of each token's squared errors, [tokens]: what counts is its error relative to its output.

    Otherwise a few tokens with huge activations, such as the first of a text, would decide alone.
    """
    sizes = _squares(outputs)
    return np.minimum(np.median(sizes) / (sizes + _TINY), np.float32(_LARGEST_IMPORTANCE))


def _squares(rows: np.ndarray) -> np.ndarray:
    """The sum of squares of each row."""
    return np.einsum("ij,ij->i", rows, rows)
