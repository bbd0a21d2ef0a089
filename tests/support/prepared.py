"""Prepare requests without an exported model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.support.toy_model import VOCAB
from topw_deploy.runtime.inputs import EditInputs
from topw_deploy.runtime.prepare import Limits, Preparer, Sequences
from topw_deploy.runtime.sequence import Sequence as GeneratedSequence
from topw_deploy.runtime.sequence import SequenceParams
from topw_deploy.sampling import TopWParameters

LIMITS = Limits(context_length=1000, vocab_size=VOCAB)
_TOKENIZER = SimpleNamespace(
    bos_token_id=None,
    eos_token_id=None,
    encode=lambda text, add_special_tokens=True: list(text.encode()),
    text_of=str,
    text_decoder=lambda prompt, hidden: None,
    special_ids={},
)


def prepare(
    request: Mapping[str, Any],
    prompts: Sequence[Sequence[int]] = ([5] * 10,),
    *,
    file: Mapping[str, Any] | None = None,
    exported: TopWParameters | Mapping[str, Any] | None = None,
    limits: Limits = LIMITS,
    geometry: tuple[str, int | None] = ("uniform", None),
    median_distance: float | None = None,
) -> Sequences:
    """The sequences of a request.

    file: the model's generation_config.json.
    exported, geometry, median_distance: the export's defaults, (metric, width) and median distance of likely pairs.
    """
    manifest = SimpleNamespace(
        sampler=SimpleNamespace(vocab_size=limits.vocab_size, geometry=geometry),
        stated_defaults=exported if isinstance(exported, Mapping) else asdict(exported or TopWParameters()),
        median_distance=median_distance,
        outputs=(SimpleNamespace(name="logits", dtype="float"),),
    )
    files = {"generation_config.json": dict(file or {})}
    folder = SimpleNamespace(path=Path("out"), manifest=manifest, read_json=lambda name: files.get(name, {}))
    preparer = Preparer(cast(Any, folder), cast(Any, _TOKENIZER), limits)
    return preparer.prepare([list(prompt) for prompt in prompts], request)


def edits_of(sequences: Iterable[GeneratedSequence], fixed: int | None = None) -> EditInputs:
    """The edits of a batch of sequences."""
    sequences = list(sequences)
    edits = EditInputs(len(sequences), fixed)
    for row, sequence in enumerate(sequences):
        edits.set(row, sequence)
    return edits


def params(request: Mapping[str, Any], **about: Any) -> SequenceParams:
    """The parameters of a request's only sequence. about: see `prepare`."""
    (sequence,) = prepare(request, **about)
    return sequence.params
