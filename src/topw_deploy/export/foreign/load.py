"""Decoders that another exporter wrote: read by reference, checked, and described for the runtime."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import onnx_ir as ir

from topw_deploy.errors import SourceError, UnsupportedModelError
from topw_deploy.export.decoder import Decoder
from topw_deploy.export.foreign.context_length import reach
from topw_deploy.export.foreign.left_out import lost_soft_cap, window_of
from topw_deploy.export.foreign.row_lengths import kept_window, takes_right_padding
from topw_deploy.export.graph.editor import find_input
from topw_deploy.export.tail.spec import NEWEST_OPSET, OLDEST_OPSET
from topw_deploy.export.write.weights import external_files
from topw_deploy.files import open_regular
from topw_deploy.manifest import MOST_TOKENS, DecoderInfo

_CACHE = re.compile(r"past_key_values\.(\d+)\.(key|value)")
# Takes the mask as a length per row, which silently misplaces rows padded on the left, and writes in place into a cache
# that is bound as past and present at once.
_IN_PLACE = "GroupQueryAttention"
_ATTENTION = (_IN_PLACE, "Attention")
_CACHE_TYPES = ("float", "float16", "bfloat16")
# Inputs by which other layouts of the same makers are known -> how to have the one that can be driven.
_OTHER_LAYOUTS = {
    "key_cache.0": "mobius's static cache; build it without --static-cache",
    "block_table": "a paged cache; build it without use_paged_attention",
}


def load_decoder(file: Path, folder: Path) -> Decoder:
    """The decoder of the ONNX `file`, its weights left where they are; configuration from `folder`.

    Its notices: what the graph leaves out of its model (export/foreign/left_out.py) and what ends its sequences
    before the context that the configuration states (export/foreign/context_length.py).
    Raises SourceError for a file or data file that cannot be read, UnsupportedModelError for a graph without the
    ecosystem's inputs and outputs (input_ids, attention_mask, past_key_values.{i}.key|value; logits, present.{i}.*).
    """
    try:
        model = ir.load(file)
    except Exception as error:  # protobuf and onnx_ir raise many kinds for a damaged file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise SourceError(
            f"{file} cannot be read as ONNX ({type(error).__name__}: {reason}); export it again."
        ) from error
    _check_data(model, file)
    _check_opset(model, file)
    _check_names(model.graph, file)
    info, notices = _describe(model.graph, folder)
    return Decoder(model, info, foreign=True, notices=tuple(notices))


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, or {} if there is no such file; SourceError if it is not a JSON object."""
    try:
        with open_regular(path, follow=True) as stream:
            data = json.loads(stream.read().decode("utf-8"))
        json.dumps(data, ensure_ascii=False).encode("utf-8")  # what is brought along must be possible to write
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read as JSON ({error}); repair it.") from None
    if not isinstance(data, dict):
        raise SourceError(f"{path} holds a {type(data).__name__}, not an object; repair it.")
    return data


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the language model of a composite one, else all of it."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def _check_data(model: ir.Model, file: Path) -> None:
    base = file.resolve().parent
    for location, path in external_files(model).items():
        beside = file.parent / location
        if Path(location).is_absolute() or ".." in Path(location).parts:
            raise SourceError(f"{file} keeps weights at {location!r}, outside its folder; do not use this model.")
        if not beside.is_file():
            raise SourceError(f"{file} needs the data file {location}, which is missing from {base}; fetch it again.")
        path.stat()


def _check_opset(model: ir.Model, file: Path) -> None:
    opset = model.opset_imports.get("", 0)
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise UnsupportedModelError(
            f"{file} is written in opset {opset}, but the sampler needs {OLDEST_OPSET} to {NEWEST_OPSET}; "
            f"export the decoder again with opset {OLDEST_OPSET}."
        )


def _check_names(graph: ir.Graph, file: Path) -> None:
    names = {value.name for value in graph.inputs}
    outputs = {value.name for value in graph.outputs}
    layers = {match[1] for name in names if (match := _CACHE.fullmatch(name or ""))}
    needed = {"input_ids", "attention_mask"} | {
        f"past_key_values.{i}.{kind}" for i in layers for kind in ("key", "value")
    }
    produced = {"logits"} | {f"present.{i}.{kind}" for i in layers for kind in ("key", "value")}
    missing = sorted(needed - names) + sorted(produced - outputs) or ([] if layers else ["past_key_values.0.key"])
    other = sorted(str(name) for name in names - needed - {"position_ids"})
    for name, layout in _OTHER_LAYOUTS.items():
        if name in names:
            raise UnsupportedModelError(f"{file} has the input {name}, which belongs to {layout}.")
    if missing or other:
        what = f"lacks {missing[0]}" if missing else f"has the input {other[0]}, which nothing would feed"
        raise UnsupportedModelError(
            f"{file} {what}; export the decoder as text-generation-with-past, with the usual names of "
            "inputs and outputs."
        )


def _describe(graph: ir.Graph, folder: Path) -> tuple[DecoderInfo, list[str]]:
    text, genai = text_part(read_json(folder / "config.json")), read_json(folder / "genai_config.json").get("model")
    genai = genai if isinstance(genai, dict) else {}
    decoder = genai.get("decoder", {}) if isinstance(genai.get("decoder"), dict) else {}
    layers = sum(1 for value in graph.inputs if _CACHE.fullmatch(value.name or "")) // 2
    heads, dims = [], []
    for layer in range(layers):
        key = find_input(graph, f"past_key_values.{layer}.key")
        assert key is not None
        heads.append(_size(key, 1, _configured(text, genai, "num_key_value_heads", "num_attention_heads", "n_head")))
        dims.append(_size(key, 3, _head_dim(text, genai)))
        _write_sizes(graph, layer, heads[-1], dims[-1])
    length = _configured(text, genai, "max_position_embeddings", "n_positions", "context_length")
    if not length:
        raise UnsupportedModelError(
            f"{folder} says nowhere how long a context the decoder takes (config.json: max_position_embeddings, "
            "genai_config.json: context_length); add it, or name a folder with the configuration with --tokenizer."
        )
    limit = reach(graph, length, window_of(text, decoder))
    notices = list(limit.notices)
    if (cap := lost_soft_cap(graph, text)) is not None:
        notices.append(
            f"the decoder leaves out the soft cap of {cap:g} on attention scores that its config.json states, so its "
            "logits are not the model's"
        )
    in_place = _reads_in_place(graph)
    info = DecoderInfo(
        model_type=str(text.get("model_type") or genai.get("type") or "unknown"),
        kv_form="shared" if in_place else "concat",
        num_layers=layers,
        num_kv_heads=tuple(heads),
        head_dim=tuple(dims),
        kv_dtype=_cache_type(graph),
        context_length=limit.tokens,
        left_padding=not any(node.op_type == _IN_PLACE for node in graph),
        weights_dtype=_weights_dtype(graph),
        attention=next((name for name in _ATTENTION if any(node.op_type == name for node in graph)), ""),
        ragged_chunks=not in_place,
        right_padding=in_place and takes_right_padding(graph),
        buffer_least=max((kept_window(node) for node in graph), default=0),
    )
    return info, notices


def _reads_in_place(graph: ir.Graph) -> bool:
    """Whether every cache tensor goes into GroupQueryAttention and nowhere else."""
    caches = [value for value in graph.inputs if _CACHE.fullmatch(value.name or "")]
    return all({node.op_type for node, _ in value.uses()} == {_IN_PLACE} for value in caches)


def _cache_type(graph: ir.Graph) -> str:
    first = find_input(graph, "past_key_values.0.key")
    assert first is not None
    name = (first.dtype or ir.DataType.FLOAT).name.lower()
    if name not in _CACHE_TYPES:
        raise UnsupportedModelError(
            f"the decoder keeps its cache as {name}, but only {', '.join(_CACHE_TYPES)} are served; "
            "export it without a quantised cache."
        )
    return name


def _configured(text: dict[str, Any], genai: dict[str, Any], *names: str) -> int | None:
    """The first of the counts `names` that is stated. Raises UnsupportedModelError for one that no model has."""
    decoder = genai.get("decoder", {}) if isinstance(genai.get("decoder"), dict) else {}
    for name in names:
        for where in (text, decoder, genai):
            value = where.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                if not 0 <= value <= MOST_TOKENS:
                    raise UnsupportedModelError(
                        f"the configuration states {name} {value!r:.40}, but at most {MOST_TOKENS} can be served; "
                        "correct config.json or genai_config.json."
                    )
                return value
    return None


def _head_dim(text: dict[str, Any], genai: dict[str, Any]) -> int | None:
    given = _configured(text, genai, "head_dim", "head_size")
    if given:
        return given
    hidden = _configured(text, genai, "hidden_size", "n_embd")
    heads = _configured(text, genai, "num_attention_heads", "n_head")
    return hidden // heads if hidden and heads else None


def _size(value: ir.Value, axis: int, configured: int | None) -> int:
    size = value.shape[axis] if value.shape is not None and len(value.shape) == 4 else None
    if isinstance(size, int):
        return size
    if configured is None:
        raise UnsupportedModelError(
            f"the cache input {value.name} has the shape {value.shape}, and no configuration gives the size of axis "
            f"{axis}; add config.json to the decoder's folder."
        )
    return configured


def _write_sizes(graph: ir.Graph, layer: int, heads: int, dim: int) -> None:
    """Fixed cache sizes in the graph's own signature, where its maker left names."""
    for value in (*graph.inputs, *graph.outputs):
        if value.name in {
            f"{side}.{layer}.{kind}" for side in ("past_key_values", "present") for kind in ("key", "value")
        }:
            shape = value.shape
            if shape is not None and len(shape) == 4:
                value.shape = ir.Shape([shape[0], heads, shape[2], dim])


def _weights_dtype(graph: ir.Graph) -> str:
    """Element type that most weight bytes have."""
    sizes: dict[str, int] = {}
    for value in graph.initializers.values():
        if value.const_value is not None:
            name = value.const_value.dtype.name.lower()
            sizes[name] = sizes.get(name, 0) + value.const_value.nbytes
    return max(sizes, key=lambda name: sizes[name]) if sizes else "float"
