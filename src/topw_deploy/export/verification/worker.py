"""The verification process: `python -m topw_deploy.export.verification.worker JSON`.

JSON is the task, see `run.run_checks`. The process prints a line of text for each result, and then one line of JSON:
all results (`verification`), the error that stopped it, if any, and the peak of memory in bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from topw_deploy.dtypes import array_name
from topw_deploy.errors import TopWError
from topw_deploy.export.quantise.blocks import StoredRows
from topw_deploy.export.quantise.rounding import Quantisation
from topw_deploy.export.source.files import read_json, text_part
from topw_deploy.export.verification.decoder import decoder_checks, generation_checks
from topw_deploy.export.verification.dequantise import dequantise_model
from topw_deploy.export.verification.quantised import (
    EXACT_QMOE,
    encode,
    evaluation_text,
    exact_copy,
    page_ends,
    quantised_checks,
)
from topw_deploy.export.verification.reference import (
    CacheDriver,
    OriginalDecoderReference,
    Reference,
    SamplerProbe,
    TorchReference,
    decoder_driver,
)
from topw_deploy.export.verification.run import PairDistance, Result, format_result, record_of
from topw_deploy.export.verification.sampler import check_bound, graph_geometry, rule_checks, sampler_checks
from topw_deploy.manifest import DecoderManifest, NotCompared, load_decoder_manifest
from topw_deploy.progress import peak_bytes
from topw_deploy.runtime.ort.native import operator_library
from topw_deploy.sampling import Geometry, median_distance
from topw_deploy.sampling.geometry import LIKELY_TEXT_TOKENS

_TEXT = (
    "def parse(text):\n    return text.split()\nThe quick brown fox jumps over the lazy dog. In 1815 it was 3.14159, "
    "and München lies south of Nürnberg. Return a list of the words in the string, using sep as the delimiter."
)
_LONGEST = 64  # tokens of a sequence, unless it must exceed a sliding window
_LONGEST_WINDOW = 512  # longer sliding windows are not tested


def main(argument: str) -> int:
    """Run the task. Returns the exit code.

    Everything else that is printed, such as messages of a model's own code, goes to standard error.
    """
    output, results, stopped = sys.stdout, [], ""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            for result in run(json.loads(argument)):
                results.append(result)
                output.write(format_result(result) + "\n")
                output.flush()
        except TopWError as error:
            stopped = str(error)
    answer = {"verification": msgspec.to_builtins(record_of(results)), "error": stopped, "peak": peak_bytes()}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    return 1 if stopped else 0


def run(task: dict[str, Any]) -> Iterator[Result]:
    """Run all checks of a task. Yields each result once it is known."""
    folder = Path(task["folder"])
    manifest = load_decoder_manifest(folder, unfinished=True)
    reference: Reference | None = None
    if task.get("onnx"):
        reference = OriginalDecoderReference(Path(task["onnx"]), manifest.decoder)
    elif task.get("checkpoint"):
        dtype, layers = array_name(manifest.decoder.kv_dtype), task.get("num_hidden_layers")
        reference = TorchReference(Path(task["checkpoint"]), dtype, layers, bool(task.get("trust_remote_code")))
    if manifest.decoder.quantisation and isinstance(reference, TorchReference):
        yield from _check_quantisation(task, folder, manifest, reference)
    os.environ.update([EXACT_QMOE])  # read by the sessions of the process that are opened from now on
    with exact_copy(folder, manifest) as compared:
        yield from _run_checks(task, compared, manifest, reference)


def _run_checks(
    task: dict[str, Any], folder: Path, manifest: DecoderManifest, reference: Reference | None
) -> Iterator[Result]:
    """Run all checks but those of quantisation. folder: with products in float32, see `exact_copy`."""
    decoder = manifest.decoder
    sequences = _test_sequences(folder, manifest)
    geometry = graph_geometry(folder, manifest.sampler.options, manifest.sampler.vocab_size)
    runs_here = decoder.kv_dtype in ("float", "float16")
    probe = decoder_driver(folder, decoder) if runs_here else None
    why_not = task["no_reference"] if reference is None else f"{decoder.kv_dtype} cannot run on a CPU"
    if reference is None or probe is None:
        yield NotCompared("decoder logits", why_not)
    else:
        yield from decoder_checks(probe, reference, decoder, sequences)
    logits = _sampler_logits(probe, reference, sequences)
    if logits is None:
        yield NotCompared("sampler", "there are no logits: the decoder cannot run here and its source is not available")
    else:
        sampler = SamplerProbe(folder)
        yield from sampler_checks(sampler, manifest.sampler, manifest.defaults, geometry, logits)
        yield from rule_checks(sampler, manifest.defaults, logits, names=manifest.sampler.rules)
        if task.get("native"):
            yield from _check_native_sampler(folder, manifest, geometry, logits)
    if task.get("measure") and reference is not None and manifest.sampler.options.metric != "uniform":
        yield from _measure_pair_distance(folder, manifest, reference, geometry)
    if manifest.sampler.neighbour_bound:
        yield check_bound(folder, geometry, manifest.sampler.vocab_size)
    if reference is None or probe is None:
        yield NotCompared("generation", why_not)
    else:
        yield from generation_checks(folder, manifest, reference, geometry, sequences[::-1])


def _check_quantisation(
    task: dict[str, Any], folder: Path, manifest: DecoderManifest, reference: TorchReference
) -> Iterator[Result]:
    """Compare the graph with the float32 model, then give `reference` the graph's rounded weights."""
    text = evaluation_text(folder, manifest, reference.parameters)
    if text is None:
        yield NotCompared("perplexity", "there is no tokenizer.json")
    else:
        sampler = manifest.sampler
        geometries = (
            graph_geometry(folder, sampler.options, sampler.vocab_size),
            reference.geometry(sampler.options.metric, sampler.vocab_size),
        )
        probe = decoder_driver(folder, manifest.decoder)
        yield from quantised_checks(probe, reference, text, manifest, geometries)
    rows = StoredRows.of(Path(task["checkpoint"]))
    scheme = Quantisation.from_dict(manifest.decoder.quantisation)
    yield from dequantise_model(reference.model, folder, scheme, rows)
    reference.name = "torch with the dequantised weights"


def _measure_pair_distance(
    folder: Path, manifest: DecoderManifest, reference: Reference, geometry: Geometry
) -> Iterator[PairDistance]:
    """Measure the median distance of likely pairs with the reference's logits on a page of text.

    Yields nothing without a tokenizer.
    """
    texts = page_ends(folder, manifest, LIKELY_TEXT_TOKENS)
    median = median_distance(geometry, (row for ids in texts for row in reference.logits(ids)))
    if median is not None:
        yield PairDistance(median)


def _check_native_sampler(
    folder: Path, manifest: DecoderManifest, geometry: Geometry, logits: np.ndarray
) -> Iterator[Result]:
    """Check the native sampler. Only `topw verify` does so: it belongs to the installation, not to the export."""
    library, why = operator_library("CPUExecutionProvider", manifest.sampler.table_form)
    if library is None:
        yield NotCompared("native sampler", why)
        return
    probe = SamplerProbe(folder, library.path)
    yield from sampler_checks(probe, manifest.sampler, manifest.defaults, geometry, logits, "native sampler")
    yield from rule_checks(probe, manifest.defaults, logits, "native sampler", manifest.sampler.rules)


def _test_sequences(folder: Path, manifest: DecoderManifest) -> list[np.ndarray]:
    """Four token sequences of different lengths, longest first.

    They begin with text, if there is a tokenizer, and go on with random ids. The longest exceeds a sliding window of up
    to _LONGEST_WINDOW tokens.
    """
    longest = _LONGEST
    window = text_part(read_json(folder / "config.json")).get("sliding_window")
    if isinstance(window, int) and window <= _LONGEST_WINDOW:
        longest = max(longest, window + 16)
    longest = min(longest, manifest.decoder.context_length - 16) if manifest.decoder.context_length > 32 else 8
    vocab = manifest.sampler.vocab_size
    text = np.concatenate(encode(folder, manifest, _TEXT) or [np.empty(0, np.int64)])
    noise = np.random.default_rng(0).integers(0, vocab, longest)
    first = np.concatenate([text, noise])[:longest]
    lengths = sorted({longest, max(2, longest // 2), max(2, longest // 9), 1}, reverse=True)
    return (
        [first]
        + [np.roll(first, -5)[:length].copy() for length in lengths[1:-1]]
        + [text[:1] if len(text) else first[:1]]
    )


def _sampler_logits(
    probe: CacheDriver | None, reference: Reference | None, sequences: list[np.ndarray]
) -> np.ndarray | None:
    """Logits after up to four prefixes of the longest sequence, float32 [n, vocab]; for the checks of the sampler.

    They are the decoder's, or the reference's if the decoder cannot run here; None if there is neither.
    """
    ids = sequences[0]
    lengths = sorted({int(n) for n in np.linspace(1, len(ids), 4)})
    if probe is None:
        return None if reference is None else reference.logits(ids)[[length - 1 for length in lengths]]
    probe.start(1)
    steps = pairwise([0, *lengths])
    return np.stack([probe.step(ids[None, past:end], np.ones((1, end), np.int64))[0] for past, end in steps])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises, so that temporary files are removed
    sys.exit(main(sys.argv[1]))
