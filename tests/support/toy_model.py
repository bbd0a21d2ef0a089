"""A decoder computable by hand, exported with the real sampler.

Logits are integers times one factor, so numpy and every batch size give the same bits:

    logits(t_1 .. t_n) = factor * (follow[t_n] + place[n - 1] + sum over t_i of features[t_i] @ mix)

A position outside `place` is an error. The sum uses the cache of two layers of different shapes, so cache errors change
the logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tests.support.toy_graph import HEAD_DIMS, OPSETS, decoder_graph
from topw_deploy.export.embedding import plain_gather
from topw_deploy.export.graph import GraphEditor
from topw_deploy.export.options import ExportOptions
from topw_deploy.export.sampler.attach import NO_BOUND, add_geometry, add_sampler_inputs, add_sampler_node
from topw_deploy.export.sampler.function import build_function
from topw_deploy.export.sampler.node import DOMAIN, SamplerSpec
from topw_deploy.export.source.resolve import Source
from topw_deploy.export.write import manifest_fields
from topw_deploy.manifest import (
    DecoderInfo,
    DecoderManifest,
    SamplerManifest,
    Verification,
    key_value_states,
    save_manifest,
)
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling import (
    Geometry,
    RuleParameters,
    SampledRow,
    TopWOptions,
    TopWParameters,
    apply_edits,
    sample_row,
    uniform_for,
)
from topw_deploy.sampling.rules import RULES

BOS, EOS, PAD = 0, 1, 2
SPECIAL = ("<s>", "</s>", "<pad>")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = len(SPECIAL) + len(BYTES)  # 259
FEATURES = 4
CONTEXT = 96

Load = Callable[..., TopWModel]
"""The fixture `load`: (toy, **options of `export`) -> the opened export."""


def byte_tokenizer(bos: bool = False) -> Tokenizer:
    """GPT-2's tokens of single bytes. bos: texts start with <s>."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
        )
    return tokenizer


def byte_ids(data: str | bytes) -> list[int]:
    """Token ids under `byte_tokenizer`."""
    data = data.encode() if isinstance(data, str) else data
    return [_ids_of_bytes()[byte] for byte in data]


@cache
def _ids_of_bytes() -> list[int]:
    """By GPT-2's printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
    return [len(SPECIAL) + BYTES.index(character) for character in characters]


@dataclass(frozen=True)
class Toy:
    """One decoder's numbers; `embeddings` only affect geometry."""

    follow: np.ndarray
    place: np.ndarray
    features: np.ndarray
    mix: np.ndarray
    embeddings: np.ndarray
    factor: float = 0.25
    options: TopWOptions = field(default_factory=lambda: TopWOptions(top_m=64, metric="uniform"))

    @property
    def vocab(self) -> int:
        return len(self.follow)

    @classmethod
    def random(cls, seed: int = 0, **changes: Any) -> Toy:
        rng = np.random.default_rng(seed)
        toy = cls(
            follow=rng.integers(-12, 12, (VOCAB, VOCAB)).astype(np.float32),
            place=rng.integers(-6, 6, (CONTEXT, VOCAB)).astype(np.float32),
            features=rng.integers(-2, 3, (VOCAB, FEATURES)).astype(np.float32),
            mix=rng.integers(-2, 3, (FEATURES, VOCAB)).astype(np.float32),
            embeddings=rng.standard_normal((VOCAB, 8)).astype(np.float32),
        )
        toy.follow[:, [BOS, EOS, PAD]] = -200  # special tokens only on request
        return replace(toy, **changes)

    @classmethod
    def script(cls, tokens: Sequence[int], prompt_tokens: int, seed: int = 0) -> Toy:
        """A decoder that continues prompts of `prompt_tokens` tokens with `tokens`."""
        toy = cls.random(seed)
        for step, token in enumerate(tokens):
            toy.place[prompt_tokens - 1 + step, token] = 4000
        return toy

    def numbers(self) -> dict[str, np.ndarray]:
        """The graph's arrays."""
        factor = np.asarray(self.factor, np.float32)
        return {
            "follow": self.follow, "place": self.place, "features": self.features, "mix": self.mix, "factor": factor,
        }  # fmt: skip

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [V]"""
        total = self.features[list(tokens)].sum(axis=0) @ self.mix
        return np.float32(self.factor) * (self.follow[tokens[-1]] + self.place[len(tokens) - 1] + total)

    def expect(
        self,
        prompt: Sequence[int],
        steps: int,
        parameters: TopWParameters | None = None,
        seed: int = 0,
        edits: Any = None,
        allowed: Any = None,
        rule: RuleParameters | None = None,
    ) -> list[SampledRow]:
        """The reference's draws.

        edits: tokens so far -> (ids, penalties, biases) or None.
        allowed: tokens so far -> words of the mask or None.
        """
        geometry = Geometry.uniform()
        if self.options.metric != "uniform":
            geometry = Geometry.from_embeddings(self.embeddings, self.options.metric)
        tokens, rows = list(prompt), []
        for _ in range(steps):
            given = edits(tokens) if edits else None
            row = sample_row(
                self.logits(tokens),
                parameters or TopWParameters(),
                self.options,
                geometry,
                uniform_for(seed, len(tokens)),
                given,
                allowed(tokens) if allowed else None,
                *((rule.code, rule.values) if rule else ()),
            )
            rows.append(row)
            tokens.append(row.next_token)
            if row.next_token == EOS:
                break
        return rows

    def softmax(self, tokens: Sequence[int], edits: Any = None) -> np.ndarray:
        logits = self.logits(tokens) if edits is None else apply_edits(self.logits(tokens), *edits)
        weights = np.exp(logits.astype(np.float64) - logits.max())
        return weights / weights.sum()


def export(
    folder: Path,
    toy: Toy,
    *,
    padding: bool = True,
    with_mass: bool = False,
    with_logits: bool = False,
    defaults: TopWParameters | None = None,
    generation_config: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    tokenizer: Tokenizer | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    context_length: int = CONTEXT,
    form: str = "concat",
    buffer_step: int = 0,
    max_length: int | None = None,
    rules: tuple[str, ...] = tuple(RULES),
) -> Path:
    """Write `folder` like the exporter.

    padding: rows may have different lengths.
    form: see toy_graph.py.
    max_length: of the cache ("scatter"), as for --target tensorrt.
    rules: that the sampler's function carries; with Top-W alone it opens and runs faster.
    """
    folder.mkdir(parents=True)
    spec = SamplerSpec(
        options=toy.options,
        vocab_size=toy.vocab,
        embedding=None if toy.options.metric == "uniform" else plain_gather(*toy.embeddings.shape),
        hidden_size=None if toy.options.metric == "uniform" else toy.embeddings.shape[1],
        opset=OPSETS[form],
        with_mass=with_mass,
        rules=rules,
    )
    (tokenizer or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config or {"eos_token": "</s>", "pad_token": "<pad>"})
    _write_json(folder / "config.json", {"model_type": "toy", "eos_token_id": EOS})
    if generation_config is not None:
        _write_json(folder / "generation_config.json", generation_config)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    decoder = DecoderInfo(
        model_type="toy",
        kv_form=form if form in ("concat", "shared") else "static",
        num_layers=2,
        states=tuple(
            state
            for layer, dim in enumerate(HEAD_DIMS[form])
            for state in key_value_states(layer, "float", 1, dim, dim)
        ),
        kv_dtype="float",
        context_length=context_length,
        left_padding=padding and form != "shared",
        right_padding=padding and form == "shared",
        ragged_chunks=form in ("concat", "scatter"),
        buffer_step=max_length or buffer_step,
        buffer_least=max_length or 0,
        target="tensorrt" if max_length else "onnxruntime",
    )
    graph, logits = decoder_graph(toy.numbers(), form, max_length)
    if with_logits:
        graph.outputs.insert(0, logits)
    fields = _save_model(folder, toy, graph, logits, spec) | {"defaults": defaults or TopWParameters()}
    save_manifest(folder, DecoderManifest(decoder=decoder, **fields))
    return folder


def export_sampler(folder: Path, toy: Toy, with_mass: bool = False, with_keep_mask: bool = False) -> Path:
    """Write a sampler-only folder (uniform metric)."""
    folder.mkdir(parents=True)
    spec = SamplerSpec(
        options=toy.options,
        vocab_size=VOCAB,
        opset=OPSETS["concat"],
        with_mass=with_mass,
        with_keep_mask=with_keep_mask,
    )
    graph = ir.Graph([], [], nodes=[], opset_imports={"": spec.opset}, name="toy")
    logits = GraphEditor(graph, "toy").input("logits", ir.DataType.FLOAT, ["batch", VOCAB])
    fields = _save_model(folder, toy, graph, logits, spec)
    save_manifest(folder, SamplerManifest(**fields))
    return folder


def _save_model(folder: Path, toy: Toy, graph: ir.Graph, logits: ir.Value, spec: SamplerSpec) -> dict[str, Any]:
    """Attach the sampler and write the graph. Returns the manifest's fields."""
    editor, others = GraphEditor(graph, "topw"), list(graph.outputs)
    inputs = [logits, *add_sampler_inputs(editor, "batch")]
    if spec.has_geometry:
        geometry = Geometry.from_embeddings(toy.embeddings, spec.options.metric)
        inputs += [*add_geometry(editor, geometry, NO_BOUND), editor.constant(toy.embeddings, "topw.embedding")]
    graph.outputs.clear()
    graph.outputs.extend([*add_sampler_node(graph, spec, inputs, "batch"), *others])
    graph.opset_imports[DOMAIN] = 1
    model = ir.Model(graph, ir_version=10)
    proto = ir.to_proto(model)
    proto.functions.append(_function(spec))
    onnx.save(proto, folder / "model.onnx")
    fields = manifest_fields(model, Source("toy", "", folder, folder), "test", spec, ExportOptions(), folder, {})
    return fields | {"verification": Verification(status="skipped")}


@cache
def _function(spec: SamplerSpec) -> onnx.FunctionProto:
    """The sampler's 2,000 nodes, which callers copy and do not change."""
    return ir.serde.serialize_function(build_function(spec))


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")
