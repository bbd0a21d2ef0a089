"""Verification process: `python -m topw_deploy.export.verification.worker JSON`.

JSON is the task (see `in_subprocess.run_checks`); prints JSON lines.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.dtypes import array_name
from topw_deploy.errors import TopWError
from topw_deploy.export.quantise.scheme import Quantisation
from topw_deploy.export.quantise.stored_rows import StoredRows
from topw_deploy.export.source.configuration import text_part
from topw_deploy.export.verification.decoder_checks import decoder_checks
from topw_deploy.export.verification.dequantised import dequantise_model, exact_products
from topw_deploy.export.verification.evaluation_text import encoded, evaluation_text, page_ends
from topw_deploy.export.verification.probe import LogitsProbe, SamplerProbe
from topw_deploy.export.verification.quantised_checks import quantised_checks
from topw_deploy.export.verification.reference import MakersReference, Reference, TorchReference
from topw_deploy.export.verification.results import PairDistance, Result, encoded_result
from topw_deploy.export.verification.rule_checks import rule_checks
from topw_deploy.export.verification.sampler_checks import bound_check, graph_geometry, sampler_checks
from topw_deploy.manifest import DecoderManifest, NotCompared, load_decoder_manifest, open_listed
from topw_deploy.memory import peak_bytes
from topw_deploy.runtime.ort.native_sampler import operator_library
from topw_deploy.sampling import Geometry, median_distance
from topw_deploy.sampling.likely_pairs import LIKELY_TEXT_TOKENS

_TEXT = (
    "def parse(text):\n    return text.split()\nThe quick brown fox jumps over the lazy dog. In 1815 it was 3.14159, "
    "and München lies south of Nürnberg. Return a list of the words in the string, using sep as the delimiter."
)
_LONGEST = 64  # tokens; more for a sliding window
_LONGEST_WINDOW = 512


def main(argument: str) -> int:
    """Print a line per result, then {"error": message} or {"peak": bytes}."""
    try:
        for result in run(json.loads(argument)):
            _print(encoded_result(result))
    except TopWError as error:
        _print({"error": str(error)})
        return 1
    _print({"peak": peak_bytes()})
    return 0


def run(task: dict[str, Any]) -> Iterator[Result]:
    """Yield all results for `task`."""
    folder = Path(task["folder"])
    manifest = load_decoder_manifest(folder)
    reference = _reference(task, manifest)
    if manifest.decoder.quantisation and isinstance(reference, TorchReference):
        yield from _cost_of_quantisation(task, folder, manifest, reference)
    with exact_products(folder, manifest) as compared:
        yield from _checks(task, compared, manifest, reference)


def _checks(
    task: dict[str, Any], folder: Path, manifest: DecoderManifest, reference: Reference | None
) -> Iterator[Result]:
    decoder = manifest.decoder
    sequences = _sequences(folder, manifest)
    geometry = graph_geometry(folder, manifest.sampler.options, manifest.sampler.vocab_size)
    runs_here = decoder.kv_dtype in ("float", "float16")
    probe = LogitsProbe(folder, decoder) if runs_here else None
    if reference is None:
        yield NotCompared("decoder logits", task["no_reference"])
    elif probe is None:
        yield NotCompared("decoder logits", f"{decoder.kv_dtype} cannot run on a CPU")
    else:
        yield from decoder_checks(probe, reference, decoder, sequences)
    logits = _some_logits(probe, reference, sequences)
    if logits is None:
        yield NotCompared("sampler", "neither the decoder nor its source gave logits")
    else:
        sampler = SamplerProbe(folder)
        yield from sampler_checks(sampler, manifest.sampler, manifest.defaults, geometry, logits)
        yield from rule_checks(sampler, manifest.defaults, logits, names=manifest.sampler.rules)
        if task.get("native"):
            yield from _native(folder, manifest, geometry, logits)
    if task.get("measure") and reference is not None and manifest.sampler.options.metric != "uniform":
        yield from _pair_distance(folder, manifest, reference, geometry)
    if manifest.sampler.neighbour_bound:
        yield bound_check(folder, geometry, manifest.sampler.vocab_size)
    if reference is None:
        yield NotCompared("generation", task["no_reference"])
    elif probe is None:
        yield NotCompared("generation", f"{decoder.kv_dtype} cannot run on a CPU")
    else:
        from topw_deploy.export.verification.generation_checks import generation_checks

        yield from generation_checks(folder, manifest, reference, geometry, sequences[::-1])


def _cost_of_quantisation(
    task: dict[str, Any], folder: Path, manifest: DecoderManifest, reference: TorchReference
) -> Iterator[Result]:
    """Compare with the float model, then round `reference` like the graph."""
    text = evaluation_text(folder, manifest, reference.parameters)
    if text is None:
        yield NotCompared("perplexity", "there is no tokenizer.json")
    else:
        sampler = manifest.sampler
        geometries = (
            graph_geometry(folder, sampler.options, sampler.vocab_size),
            reference.geometry(sampler.options.metric, sampler.vocab_size),
        )
        probe = LogitsProbe(folder, manifest.decoder)
        yield from quantised_checks(probe, reference, text, manifest, geometries)
    rows = StoredRows.of(Path(task["checkpoint"]))
    dequantise_model(reference.model, folder, Quantisation.from_dict(manifest.decoder.quantisation), rows)
    reference.name = "torch with the dequantised weights"


def _pair_distance(
    folder: Path, manifest: DecoderManifest, reference: Reference, geometry: Geometry
) -> Iterator[PairDistance]:
    texts = page_ends(folder, manifest, LIKELY_TEXT_TOKENS)
    median = median_distance(geometry, (row for ids in texts for row in reference.logits(ids)))
    if median is not None:
        yield PairDistance(median)


def _native(folder: Path, manifest: DecoderManifest, geometry: Geometry, logits: np.ndarray) -> Iterator[Result]:
    """Check the native sampler; only for `topw verify`, as it belongs to the installation, not to the file."""
    library, why = operator_library("CPUExecutionProvider", manifest.sampler.table_form)
    if library is None:
        yield NotCompared("native sampler", why)
        return
    probe = SamplerProbe(folder, library.path)
    yield from sampler_checks(probe, manifest.sampler, manifest.defaults, geometry, logits, "native sampler")
    yield from rule_checks(probe, manifest.defaults, logits, "native sampler", manifest.sampler.rules)


def _reference(task: dict[str, Any], manifest: DecoderManifest) -> Reference | None:
    if task.get("onnx"):
        return MakersReference(Path(task["onnx"]), manifest.decoder)
    if task.get("checkpoint"):
        dtype = array_name(manifest.decoder.kv_dtype)
        return TorchReference(
            Path(task["checkpoint"]), dtype, task.get("num_hidden_layers"), bool(task.get("trust_remote_code"))
        )
    return None


def _sequences(folder: Path, manifest: DecoderManifest) -> list[np.ndarray]:
    """Four sequences of different lengths, longest first: text with a tokenizer, then random ids.

    The longest exceeds the sliding window, unless too long to test.
    """
    longest = _LONGEST
    window = _window(folder, manifest)
    if window is not None and window <= _LONGEST_WINDOW:
        longest = max(longest, window + 16)
    longest = min(longest, manifest.decoder.context_length - 16) if manifest.decoder.context_length > 32 else 8
    vocab = manifest.sampler.vocab_size
    text = _text_ids(folder, manifest)
    noise = np.random.default_rng(0).integers(0, vocab, longest)
    first = np.concatenate([text, noise])[:longest]
    lengths = sorted({longest, max(2, longest // 2), max(2, longest // 9), 1}, reverse=True)
    return (
        [first]
        + [np.roll(first, -5)[:length].copy() for length in lengths[1:-1]]
        + [text[:1] if len(text) else first[:1]]
    )


def _window(folder: Path, manifest: DecoderManifest) -> int | None:
    try:
        with open_listed(folder, "config.json", manifest.files["config.json"]) as stream:
            window = text_part(json.loads(stream.read().decode("utf-8"))).get("sliding_window")
    except (KeyError, ValueError, AttributeError, RecursionError):
        return None
    return window if isinstance(window, int) else None


def _text_ids(folder: Path, manifest: DecoderManifest) -> np.ndarray:
    vocab = manifest.sampler.vocab_size
    ids = encoded(folder, manifest, _TEXT)
    return np.asarray([token for token in ids or () if token < vocab], dtype=np.int64)


def _some_logits(
    probe: LogitsProbe | None, reference: Reference | None, sequences: list[np.ndarray]
) -> np.ndarray | None:
    ids = sequences[0]
    places = sorted({int(n) for n in np.linspace(1, len(ids), 4)})
    if probe is not None:
        probe.start(1)
        rows, seen = [], 0
        for place in places:
            rows.append(probe.step(ids[None, seen:place], np.ones((1, place), np.int64))[0])
            seen = place
        return np.stack(rows)
    if reference is not None:
        return reference.logits(ids)[[place - 1 for place in places]]
    return None


def _print(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises, so that temporary files are removed
    sys.exit(main(sys.argv[1]))
