"""The run of `topw bench decode`: a process per side, which loads once and then generates whenever its turn comes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from topw_deploy.bench.decode.argmax import with_argmax
from topw_deploy.bench.decode.catalogue import Side, choose
from topw_deploy.bench.decode.report import DecodeReport, SideResult, ThreadsReport
from topw_deploy.bench.decode.settings import DecodeSettings
from topw_deploy.bench.machine import describe
from topw_deploy.bench.process import Worker
from topw_deploy.bench.progress import Progress, Tick, no_progress
from topw_deploy.bench.timing import interleave
from topw_deploy.errors import ManifestError, ParameterError
from topw_deploy.manifest import DecoderManifest, Manifest, load_manifest
from topw_deploy.reports import counted

_WARMUP = 1


def run(settings: DecodeSettings, progress: Progress = no_progress) -> DecodeReport:
    """Take the measurement.

    Raises ManifestError for a folder that is no model, ParameterError for settings that do not fit it, BenchmarkError
    for a side that was named and is absent, or that dies.
    """
    manifest = load_manifest(settings.folder)
    prompt = _prompt(settings, manifest)
    present, absent = choose(settings)
    machine = describe()
    with tempfile.TemporaryDirectory(prefix=".topw-bench-", dir=_beside(settings.folder)) as scratch:
        ready = [_with_file(side, settings.folder, Path(scratch)) for side in present]
        total = len(settings.threads) * len(ready) * (settings.rounds + _WARMUP)
        with progress.bar(total, "run") as tick:
            reports = [_measure(ready, settings, prompt, threads, tick, progress) for threads in settings.threads]
    return DecodeReport(settings, machine, reports, [(side.label, str(side.why_not)) for side in absent])


def _measure(
    chosen: Sequence[Side], settings: DecodeSettings, prompt: list[int], threads: int, tick: Tick, progress: Progress
) -> ThreadsReport:
    """All sides with so many threads."""
    with _workers(chosen, threads, progress) as workers:
        turns = {
            name: partial(worker.call, "run", prompt=prompt, new_tokens=settings.new_tokens)
            for name, worker in workers.items()
        }
        samples = interleave(turns, settings.rounds, _WARMUP, seed=settings.seed, tick=tick)
        results = {
            side.name: SideResult(
                label=side.label,
                kind=side.kind,
                runs=samples[side.name],
                load_seconds=workers[side.name].call("load_seconds"),
                peak_bytes=workers[side.name].peak_bytes(),
            )
            for side in chosen
        }
    return ThreadsReport(threads, results)


@contextmanager
def _workers(chosen: Sequence[Side], threads: int, progress: Progress) -> Iterator[Mapping[str, Worker]]:
    with ExitStack() as stack:
        workers = {}
        for side in chosen:
            progress.say(f"Loading {side.label}, {counted(threads, 'thread')}")
            settings = {**side.settings, "threads": threads}
            worker = Worker(side.label, side.worker, settings, python=side.python, threads=threads)
            workers[side.name] = stack.enter_context(worker)
        yield workers


def _prompt(settings: DecodeSettings, manifest: Manifest) -> list[int]:
    """Random ids that every side takes."""
    if not isinstance(manifest, DecoderManifest):
        raise ManifestError(f"{settings.folder} is a sampler without a decoder; use `topw bench sampler` for it.")
    needed = settings.prompt_tokens + settings.new_tokens
    if needed > manifest.decoder.context_length:
        raise ParameterError(
            f"{settings.prompt_tokens} + {settings.new_tokens} tokens are {needed}, but the context has "
            f"{manifest.decoder.context_length}; lower prompt_tokens or new_tokens.",
            "prompt_tokens",
            "new_tokens",
        )
    rng = np.random.default_rng(settings.seed)
    return [int(token) for token in rng.integers(0, manifest.sampler.vocab_size, settings.prompt_tokens)]


def _with_file(side: Side, export: Path, scratch: Path) -> Side:
    """The ArgMax side with its file written; any other as it is."""
    if side.name != "argmax":
        return side
    return replace(side, settings={**side.settings, "argmax": str(with_argmax(export, scratch))})


def _beside(folder: Path) -> Path | None:
    """Where weights can be hard-linked to: the folder's parent, or the system's place if that is read-only."""
    try:
        with tempfile.TemporaryDirectory(prefix=".topw-bench-", dir=folder.resolve().parent):
            return folder.resolve().parent
    except OSError:
        return None
