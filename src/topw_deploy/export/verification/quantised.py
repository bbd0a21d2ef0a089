"""Measure what quantisation loses on text, and make a copy of the graph without rounded activations.

The other checks have the same rounded weights on both sides. So these are the only checks that poor rounding fails, and
only for trained models.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from msgspec.structs import replace

from topw_deploy.errors import TokenizerError, VerificationError, one_line
from topw_deploy.export.verification.reference import CacheDriver, Reference
from topw_deploy.manifest import (
    MODEL_NAME,
    Check,
    DecoderManifest,
    Manifest,
    Note,
    describe_files,
    open_listed,
    save_manifest,
)
from topw_deploy.sampling import Geometry, sample_row, uniform_for
from topw_deploy.sampling.geometry import SAMPLE_TEXT, first_and_last_tokens, split_special_prefix

_COLUMNS = 256  # tokens in each row
_LARGEST_BUDGET, _SMALLEST_BUDGET = 4096, 1024  # tokens of text
_LARGEST_WORK = 4 * 10**12  # multiply-adds of a model for the text: under a minute on a few cores


def evaluation_text(folder: Path, manifest: DecoderManifest, parameters: int) -> EvaluationText | None:
    """The text for perplexity, as rows of tokens; None without tokenizer.json or if the text is too short.

    parameters: the number of weights of the model, which limits the length of the text.
    """
    from topw_deploy.tiny.corpus import topic_sections

    text, name = SAMPLE_TEXT, "prose and code"
    with contextlib.suppress(ImportError):  # some distributions package Python without its manual
        text = "\n\n".join([text, *topic_sections()])
        name = "prose, code and Python's reference manual"
    encoded = encode(folder, manifest, text)
    if encoded is None:
        return None
    start, body = encoded
    length = min(_COLUMNS, manifest.decoder.context_length, len(start) + len(body)) - len(start)
    budget = max(_SMALLEST_BUDGET, min(_LARGEST_BUDGET, _LARGEST_WORK // max(1, 2 * parameters)))
    count = min(max(1, budget // max(1, length)), len(body) // max(1, length))
    if length + len(start) < 2 or count < 1:
        return None
    rows = np.hstack([np.tile(start, (count, 1)), body[: count * length].reshape(count, length)])
    return EvaluationText(rows, len(start), name)


def page_ends(folder: Path, manifest: DecoderManifest, columns: int) -> list[np.ndarray]:
    """The first and the last tokens of a page of prose and code, int64 [n] each; [] without tokenizer.json.

    Each begins with the tokenizer's leading special tokens and has at most `columns` tokens.
    """
    encoded = encode(folder, manifest, SAMPLE_TEXT)
    if encoded is None:
        return []
    return first_and_last_tokens(*encoded, min(columns, manifest.decoder.context_length))


def encode(folder: Path, manifest: Manifest, text: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Encode `text` with the export's tokenizer.json, without ids outside the vocabulary.

    Returns (the leading special tokens, the other tokens), int64 each, or None without the file. Raises ManifestError
    if the file was changed, and TokenizerError if it cannot be read.
    """
    entry = manifest.files.get("tokenizer.json")
    if entry is None:
        return None
    from tokenizers import Tokenizer

    with open_listed(folder, "tokenizer.json", entry) as stream:
        data = stream.read()
    try:
        found = Tokenizer.from_str(data.decode("utf-8")).encode(text)
    except Exception as error:  # noqa: BLE001  # the library raises bare Exception
        reason = one_line(error, 200)
        raise TokenizerError(
            f"{folder / 'tokenizer.json'} cannot be read ({reason}); export the model again."
        ) from None
    return split_special_prefix(found.ids, found.special_tokens_mask, manifest.sampler.vocab_size)


# Largest increase of the loss in nats per token: 10 % of perplexity for int4. The default costs 1 to 5 %, and correct
# 8-bit weights at most 0.002 nats. Scales a fifth too large in one layer of the bundled model cost 0.3, and swapped
# half bytes in one matrix 0.13 to 1.1.
PERPLEXITY_BOUNDS = {"int4": 0.095, "int8": 0.02}
PERPLEXITY = "perplexity, log of the ratio"
"""The name of the check, or of the note in its place."""
# The same for models that are no better than guessing. Rounding changes their loss in either direction, by up to 0.6 in
# random models at 4 bits. So a smaller increase proves nothing; a larger one fails.
UNTRAINED_BOUND = 1.0
_CERTAINTY = 2.0  # the number of standard errors by which a loss must exceed its bound to fail
_BATCH = 16  # rows in a batch
_CROPS = 32  # positions at which kept sets and tokens are compared
_SEED = 11


@dataclass(frozen=True)
class EvaluationText:
    """A text on which a loss is measured.

    rows: token ids, int64 [rows, columns].
    prefix: the number of special tokens (BOS) at the start of each row.
    name: describes the text in results.
    """

    rows: np.ndarray
    prefix: int
    name: str


@dataclass(frozen=True)
class Loss:
    """The loss of both models on a text, in nats per token.

    exact: of the float32 model.
    quantised: of the exported graph.
    error: the standard error of their difference.
    """

    exact: float
    quantised: float
    error: float

    @classmethod
    def of(cls, exact: np.ndarray, quantised: np.ndarray) -> Loss:
        """Average losses [rows, tokens]. The samples are rows, because the losses of neighbouring tokens correlate."""
        samples = (quantised - exact).mean(axis=1) if len(exact) > 1 else (quantised - exact)[0]
        error = samples.std(ddof=1) / math.sqrt(len(samples)) if len(samples) > 1 else 0.0
        return cls(float(exact.mean()), float(quantised.mean()), float(error))

    @property
    def difference(self) -> float:
        """The increase of the loss: the logarithm of the ratio of perplexities."""
        return self.quantised - self.exact


def quantised_checks(
    probe: CacheDriver,
    reference: Reference,
    text: EvaluationText,
    manifest: DecoderManifest,
    geometries: tuple[Geometry, Geometry],
) -> Iterator[Check | Note]:
    """Compare perplexity, kept sets and tokens of the exported graph with those of the float32 model.

    probe: the exported graph, with its own products.
    reference: the float32 model.
    geometries: of the graph's table and of the float32 model's.

    Yields the perplexity, which can fail, and then two notes.
    """
    counted = text.rows.shape[1] - 1
    places = {divmod(int(place), counted) for place in np.linspace(0, len(text.rows) * counted - 1, _CROPS)}
    exact, quantised, agreements = [], [], []
    for start in range(0, len(text.rows), _BATCH):
        rows = text.rows[start : start + _BATCH]
        here = {(row - start, column) for row, column in places if start <= row < start + len(rows)}
        losses, float_logits = _float_losses(reference, rows, here)
        exact.append(losses)
        losses = np.empty_like(losses)
        probe.start(len(rows))
        for column in range(counted):
            logits = probe.step(rows[:, column : column + 1], np.ones((len(rows), column + 1), np.int64))
            losses[:, column] = _losses(logits, rows[:, column + 1])
            for row in [row for row, place in here if place == column]:
                pair = logits[row], float_logits[row, column]
                agreements.append(_agreement(*pair, (start + row) * counted + column, manifest, geometries))
        quantised.append(losses)
    loss = Loss.of(*(np.concatenate(part)[:, max(0, text.prefix - 1) :] for part in (exact, quantised)))
    yield perplexity_check(loss, manifest, text)
    for what, same in zip(("kept sets", "tokens"), np.sum(agreements, axis=0), strict=True):
        yield Note(f"{what} compared with float32", f"{same} of {len(agreements)} equal under the defaults")


def perplexity_check(loss: Loss, manifest: DecoderManifest, text: EvaluationText) -> Check | Note:
    """Check that the loss grew by at most the bound, within its statistical error.

    A model that is no better than guessing does not pass: it fails, or gets a Note.
    """
    trained = loss.exact < math.log(manifest.sampler.vocab_size)
    bound = PERPLEXITY_BOUNDS[f"int{manifest.decoder.quantisation['bits']}"] if trained else UNTRAINED_BOUND
    passed = bool(loss.difference - _CERTAINTY * loss.error <= bound)
    tokens = len(text.rows) * (text.rows.shape[1] - max(1, text.prefix))
    detail = (
        f"standard error {loss.error:.1g}; {np.exp(loss.quantised):.4g}, in float32 {np.exp(loss.exact):.4g}; "
        f"{tokens} tokens of {text.name}"
    )
    if passed and not trained:
        return Note(PERPLEXITY, f"{loss.difference:.2g}, of a model that does no better than guessing; {detail}")
    return Check(PERPLEXITY, passed, loss.difference, bound, detail)


def _float_losses(
    reference: Reference, rows: np.ndarray, places: set[tuple[int, int]]
) -> tuple[np.ndarray, dict[tuple[int, int], np.ndarray]]:
    """The float32 model's losses [rows, columns - 1], and its logits at the places (row, column)."""
    losses = np.empty((len(rows), rows.shape[1] - 1))
    kept: dict[tuple[int, int], np.ndarray] = {}
    for number, row in enumerate(rows):
        logits = reference.logits(row)
        for column in range(len(row) - 1):
            losses[number, column] = _losses(logits[None, column], row[None, column + 1])[0]
        kept |= {place: logits[place[1]].copy() for place in places if place[0] == number}
    return losses, kept


def _losses(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """-log p of each token, in nats: float64 [n]. logits: [n, vocab]; tokens: ids [n]."""
    wide = logits.astype(np.float64)
    most = wide.max(axis=1)
    chosen = wide[np.arange(len(tokens)), tokens]
    return np.asarray(np.log(np.exp(wide - most[:, None]).sum(axis=1)) + most - chosen)


def _agreement(
    logits: np.ndarray,
    float_logits: np.ndarray,
    place: int,
    manifest: DecoderManifest,
    geometries: tuple[Geometry, Geometry],
) -> tuple[bool, bool]:
    """Whether both models keep the same set, and draw the same token, under the defaults. place: seeds the draw."""
    uniform = uniform_for(_SEED, place)
    rows = [
        sample_row(row, manifest.defaults, manifest.sampler.options, geometry, uniform)
        for row, geometry in zip((logits, float_logits), geometries, strict=True)
    ]
    same_set = np.array_equal(np.sort(rows[0].kept_ids), np.sort(rows[1].kept_ids))
    return same_set, rows[0].next_token == rows[1].next_token


_FLOAT32_LEVEL = 1  # the accuracy_level of products in float32
EXACT_QMOE = ("ORT_QMOE_CPU_QNBIT_GEMM", "fp32")
"""An environment variable that sessions of onnxruntime 1.31 read: QMoE then computes in float32."""


@contextlib.contextmanager
def exact_copy(folder: Path, manifest: DecoderManifest) -> Iterator[Path]:
    """A context manager that yields a temporary copy of `folder` whose quantised products compute in float32.

    Yields `folder` itself if its products do so already. Data files are hard-linked where possible. QMoE of 8 bits has
    no attribute for this, but the environment variable EXACT_QMOE.

    Raises VerificationError if the copy cannot be created beside `folder`.
    """
    if manifest.decoder.quantisation.get("accuracy_level", 0) in (0, _FLOAT32_LEVEL):
        yield folder
        return
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".topw-exact-", dir=folder.parent)
    except OSError as error:
        raise VerificationError(
            f"{folder.parent} cannot be written ({error.strerror}), but verification needs a temporary variant of the "
            "graph there; copy the folder and verify the copy."
        ) from error
    with scratch as name:
        made = Path(name)
        for file in manifest.files.keys() - {MODEL_NAME}:
            (made / file).parent.mkdir(exist_ok=True, parents=True)
            try:
                os.link(folder / file, made / file)
            except OSError:
                shutil.copyfile(folder / file, made / file)
        model = ir.load(folder / MODEL_NAME)
        for node in model.graph:
            if "accuracy_level" in node.attributes:
                node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", _FLOAT32_LEVEL)
        ir.save(model, made / MODEL_NAME)
        save_manifest(made, replace(manifest, files=manifest.files | describe_files(made, [MODEL_NAME])))
        yield made
