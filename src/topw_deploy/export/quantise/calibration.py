"""Round the weights of a torch model one product after the other, while it computes a text.

The model computes the text twice side by side: with its own weights, and with the rounded ones. Each product is rounded
for the inputs that it gets from the products before it, which are rounded already (see `feedback`), and so that its
outputs come nearer to those of the model's own weights. So the weights are read once, in the model's order.

Before that, a part of the text shows what each product's rounding alone changes in the output of its layer. That
predicts what it costs in perplexity far better than the product's own error does: the same error matters little in
queries and keys, and much in values.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from topw_deploy.errors import ParameterError, TopWError, UnsupportedModelError, one_line
from topw_deploy.export.quantise.blocks import (
    QuantisedWeight,
    WeightBlocks,
    check_finite,
    decode_blocks,
    pack_codes,
    row_digest,
)
from topw_deploy.export.quantise.choice import RoundedRows, RowFormat, rounded_blocks
from topw_deploy.export.quantise.feedback import round_with_feedback
from topw_deploy.export.quantise.rounding import BUNDLED, Quantisation
from topw_deploy.export.source.checkpoint import load_during_calls
from topw_deploy.export.source.text_decoder import context_length, decoder_layers, replaced
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
_MEASURED = 8  # the effects of rounding are measured on one row of text in this many
_CORRECTED = 0.5  # the part of the errors before a product that its weight corrects: few tokens state all inexactly
_LARGEST_CORRECTION = 0.25  # of a row, relative to its length; more could turn it into another row
_CORRECTION_DAMPING = 0.3  # of the Gram matrix, relative to its diagonal
_TINY = torch.finfo(torch.float32).tiny


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

    def effects(self, wanted: Mapping[bytes, int]) -> Mapping[bytes, float]:
        """Measure what rounding costs, on a part of the text. See `measure_effects`.

        Raises ParameterError for a text that cannot be read or is too short.
        """
        rows = self._rows[::_MEASURED]
        if rows.size == 0:  # the model's tokenizer has no tokens for the bundled text
            return {}
        self.progress.say(f"Measuring what rounding changes, on {rows.size:,} tokens of text")
        return measure_effects(self.module, rows, wanted, self.scheme)

    def round(self, wanted: Mapping[bytes, RowFormat]) -> RoundedRows:
        """Round the rows that `wanted` names by digest. See `calibrate`."""
        if self._rows.size == 0:
            return {}
        self.progress.say(f"Rounding the weights for {self._rows.size:,} tokens of text")
        with self.progress.bar(len(wanted), "rows") as advance:
            return calibrate(self.module, self._rows, wanted, self.scheme, advance)

    @cached_property
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


def measure_effects(
    model: PreTrainedModel, rows: np.ndarray, wanted: Mapping[bytes, int], scheme: Quantisation
) -> dict[bytes, float]:
    """Measure what the rounding of each matrix alone, to nearest, changes in the output of its layer.

    rows, wanted: see `calibrate`; the values of `wanted` are block sizes.

    Returns the mean of |change|^2 / |output|^2 over the tokens, divided among the rows of the matrix, by digest. Leaves
    out experts, and all matrices of a model whose layers are not found.

    Raises UnsupportedModelError if transformers cannot compute the model.
    """
    effects = _Effects(wanted, scheme, rows.size)
    with contextlib.ExitStack() as hooks:
        for layer in decoder_layers(model)[1]:
            hooks.callback(layer.register_forward_pre_hook(effects.enter_layer).remove)
            hooks.callback(layer.register_forward_hook(effects.leave_layer, with_kwargs=True).remove)
        _compute(model, rows, effects)
    return effects.found


def calibrate(
    model: PreTrainedModel,
    rows: np.ndarray,
    wanted: Mapping[bytes, RowFormat],
    scheme: Quantisation,
    advance: Callable[[int], object],
) -> RoundedRows:
    """Round the matrices of `model` for the text `rows`, int64 [rows, columns].

    wanted: digest of each row to be rounded -> its format; other rows stay float.
    advance: called with the number of rows that were rounded.

    Raises UnsupportedModelError if transformers cannot compute the model.
    """
    rounding = _Rounding(wanted, scheme, advance, 2 * rows.size)
    _compute(model, np.concatenate([rows, rows]), rounding)
    return rounding.found


def _compute(model: PreTrainedModel, rows: np.ndarray, products: _Products) -> None:
    """Run `model` up to its head with `products`."""
    head = model.get_output_embeddings()
    handle = None if head is None else head.register_forward_pre_hook(_stop)
    try:
        stopped = contextlib.suppress(_StopForwardError)
        with torch.no_grad(), load_during_calls(model), _looped_experts(model), stopped, products:
            model(input_ids=torch.from_numpy(rows), use_cache=False)
    except TopWError:
        raise
    except Exception as error:  # a model's code may raise anything, and an operator may lack a float16 kernel
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot compute the calibration text ({one_line(error)}); use --calibration none."
        ) from error
    finally:
        if handle is not None:
            handle.remove()


def _looped_experts(model: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    """Inside the block, each expert is a product of its own, in transformers' loop over experts."""
    name = "_experts_implementation_internal"
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return replaced(*((config, name, "eager") for config in configs.values() if name in vars(config)))


class _StopForwardError(Exception):
    """Ends the forward pass in front of the head, whose logits nothing needs."""


def _stop(*_call: Any) -> None:
    raise _StopForwardError


class _Products(TorchFunctionMode):
    """Inside the block, `product` computes a model's products with matrices."""

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
        products = self.product(inputs, weight.detach())
        if products is None:
            return func(*args, **kwargs)
        return (products if bias is None else products + bias).to(inputs.dtype)

    def product(self, inputs: Tensor, weight: Tensor) -> Tensor | None:
        """The product with the weight [outputs, inputs]; None to compute it as usual."""
        raise NotImplementedError


class _Effects(_Products):
    """Inside the block, each layer also runs once for each of its matrices, rounded. See `measure_effects`."""

    def __init__(self, wanted: Mapping[bytes, int], scheme: Quantisation, tokens: int) -> None:
        super().__init__()
        self.found: dict[bytes, float] = {}
        self._wanted, self._scheme, self._tokens = wanted, scheme, tokens
        self._seen: dict[bytes, list[bytes]] | None = None  # of a layer's matrices: digest of the first row -> of all
        self._rounded: bytes | None = None  # the matrix that is rounded

    def enter_layer(self, *_call: Any) -> None:
        """A hook before the forward of a layer."""
        self._seen = {}

    def leave_layer(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A hook after the forward of a layer: repeat it with each of its matrices rounded."""
        exact = _hidden_states(output)
        for first, digests in list((self._seen or {}).items()):
            self._rounded = first
            moved = _hidden_states(layer.forward(*args, **kwargs)) - exact
            effect = float((moved.square().sum(-1) / (exact.square().sum(-1) + _TINY)).mean())
            for digest in digests if math.isfinite(effect) else ():
                self.found[digest] = self.found.get(digest, 0.0) + effect / len(digests)
        self._seen = self._rounded = None

    def product(self, inputs: Tensor, weight: Tensor) -> Tensor | None:
        if self._seen is None or inputs.numel() != self._tokens * inputs.shape[-1]:
            return None
        first = row_digest(weight[0].float().numpy())
        if first not in self._wanted or self._rounded not in (None, first):
            return None
        rows = weight.float().contiguous().numpy()
        if self._rounded is None:
            self._seen[first] = [row_digest(row) for row in rows]
            return None
        read, float32 = lambda start, stop: rows[start:stop], np.dtype(np.float32)
        nearest = QuantisedWeight.rounded(read, rows.shape, float32, self._wanted[first], self._scheme).values()
        return inputs.float() @ torch.from_numpy(nearest).T


def _hidden_states(output: Any) -> Tensor:
    """Those of a layer's output, float32."""
    found: Tensor = output[0] if isinstance(output, tuple | list) else output
    return found.float()


class _Rounding(_Products):
    """Inside the block, the second half of the batch computes with rounded matrices in place of wanted ones.

    Experts do so for all their tokens, because these are no longer in the batch's order.

    found: the matrices rounded so far.
    """

    def __init__(
        self, wanted: Mapping[bytes, RowFormat], scheme: Quantisation, advance: Callable[[int], object], tokens: int
    ) -> None:
        super().__init__()
        self.found: RoundedRows = {}
        self._wanted, self._scheme, self._advance, self._tokens = wanted, scheme, advance, tokens

    def product(self, inputs: Tensor, weight: Tensor) -> Tensor | None:
        weight, dtype = weight.float().contiguous(), weight.dtype
        rows = weight.numpy()
        if row_digest(rows[0]) not in self._wanted:
            return None
        digests = [row_digest(row) for row in rows]
        tokens = inputs.detach().float().reshape(-1, inputs.shape[-1])
        if not all(digest in self._wanted for digest in digests):
            return None
        if len(tokens) < _LEAST_TOKENS or not torch.isfinite(tokens).all():
            return None
        parts: dict[RowFormat, list[int]] = {}
        for place, digest in enumerate(digests):
            parts.setdefault(self._wanted[digest], []).append(place)
        half = len(tokens) // 2 if len(tokens) == self._tokens else 0
        exact, own = tokens[:half] @ weight.T, tokens[half:]
        outputs, rounded = exact if half else own @ weight.T, torch.empty_like(weight)
        for row_format, places in parts.items():
            names = [digests[place] for place in places]
            if not self.found.keys() >= set(names):  # several layers may share a matrix
                check_finite(rows)
                scheme = replace(self._scheme, bits=row_format.bits, table_bits=None)
                how = row_format.block_size, scheme, np.dtype(np.float16 if dtype == torch.float16 else np.float32)
                data = round_for_tokens(weight[places], tokens[:half], own, outputs[:, places], *how)
                for row, name in enumerate(names):
                    self.found.setdefault(name, (data, row))
                self._advance(len(names))
            blocks = rounded_blocks(self.found, names)
            rounded[places] = torch.from_numpy(decode_blocks(blocks, row_format.bits, rows.shape[1]))
        return torch.cat([exact, own @ rounded.T]).reshape(*inputs.shape[:-1], len(rows))


def round_for_tokens(
    weight: Tensor,
    exact: Tensor,
    inputs: Tensor,
    outputs: Tensor,
    block_size: int,
    scheme: Quantisation,
    scale_type: np.dtype[Any],
) -> WeightBlocks:
    """Round `weight`, float32 [outputs, inputs], so that its products with `inputs` are near `outputs`.

    exact: the inputs of the model's own weights, [tokens, inputs], which give `outputs`; none if they are `inputs`.
    """
    factors = _importance(outputs).sqrt()[:, None]
    scaled = inputs * factors
    gram = scaled.T @ scaled
    if len(exact):
        weight = weight + _correction(weight, ((exact - inputs) * factors).T @ scaled, gram)
    codes, scales, zeros = round_with_feedback(weight.numpy(), gram.numpy(), block_size, scheme, scale_type)
    packed = pack_codes(codes, scheme.bits).reshape(*scales.shape, -1)
    return WeightBlocks(packed, scales, None if scheme.symmetric else pack_codes(zeros, scheme.bits))


def _correction(weight: Tensor, moved: Tensor, gram: Tensor) -> Tensor:
    """What to add to `weight`, so that its products with the inputs come nearer to those with the exact ones (GPTAQ).

    moved: sum of (exact inputs - inputs)^T inputs.
    """
    damped = gram + torch.diag(gram.diagonal() * _CORRECTION_DAMPING + _TINY)
    found, failed = torch.linalg.solve_ex(damped, weight @ moved, left=False)
    if failed or not torch.isfinite(found).all():
        return torch.zeros_like(weight)
    most = _LARGEST_CORRECTION * weight.norm(dim=1, keepdim=True)
    size = _CORRECTED * found.norm(dim=1, keepdim=True)
    return _CORRECTED * found * (most / torch.maximum(size, most).clamp_min(_TINY))


def _importance(outputs: Tensor) -> Tensor:
    """The factor of each token's squared errors, [tokens]: what counts is its error relative to its output.

    Otherwise a few tokens with huge activations, such as the first of a text, would decide alone.
    """
    sizes = outputs.square().sum(dim=1)
    return (sizes.median() / (sizes + _TINY)).clamp_max(_LARGEST_IMPORTANCE)
