"""Load the decoder of another exporter, and find the limits of its sequence length."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir

from topw_deploy.dtypes import FLOATS
from topw_deploy.errors import SourceError, UnsupportedModelError, one_line
from topw_deploy.export.embedding import lookups_of
from topw_deploy.export.graph import (
    Decoder,
    initializer_tensors,
    is_constant,
    number_attribute,
    required_input,
)
from topw_deploy.export.sampler.node import NEWEST_OPSET, OLDEST_OPSET
from topw_deploy.export.source.files import json_object, read_json, text_part
from topw_deploy.manifest import MOST_TOKENS, DecoderInfo, State, key_value_states

_COS_CACHE_INPUTS = {"GroupQueryAttention": 7, "RotaryEmbedding": 2}  # index in com.microsoft's operators
# Graphs of standard operators apply a window by comparing with its size, or by adding or subtracting it.
_WINDOW_OPERATORS = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Sub", "Add"}
_BETWEEN_CAP_AND_SOFTMAX = {"Mul", "Add", "Where", "Cast", "Identity", "Reshape", "Max", "Clip"}
_CAP_TOLERANCE = 1e-3  # relative: the graph's cap may be rounded to half precision


class Window(NamedTuple):
    """A sliding window of a model.

    size: number of visible tokens, including the query.
    layers: number of layers that have it; None for an unknown number, at least one.
    """

    size: int
    layers: int | None


def sequence_limit(graph: ir.Graph, configured: int, window: Window | None) -> tuple[int, list[str]]:
    """The smallest of the configured context, the tables of positions in `graph`, and a window that `graph` ignores.

    configured: the context in tokens.
    window: the model's sliding window, or None.

    Returns (tokens, sentences for the user that say why it is shorter than configured).
    """
    tokens, notices = configured, []
    rows = min(_position_rows(graph), default=tokens)
    if rows < tokens:
        notices.append(
            f"the decoder's table of positions has {rows} rows, fewer than the context of {tokens} tokens that its "
            f"configuration states, so a sequence may have at most {rows} tokens"
        )
        tokens = rows
    if window is not None and window.size < tokens and not applies_window(graph, window):
        notices.append(
            f"the decoder ignores the model's sliding window, so a sequence may have at most {window.size} tokens: "
            "a longer one would need the window"
        )
        tokens = window.size
    return tokens, notices


def window_of(config: dict[str, Any], genai: dict[str, Any]) -> Window | None:
    """The sliding window that the configuration states, or None.

    config: config.json, or its part for text.
    genai: the decoder's part of genai_config.json, which is used only if `config` is empty.
    """
    if config:
        size, types = config.get("sliding_window"), config.get("layer_types")
        if not isinstance(size, int) or size <= 0 or config.get("use_sliding_window") is False:
            return None
        if not isinstance(types, list):
            return Window(size, None)
        sliding = sum(kind == "sliding_attention" for kind in types)
        return Window(size, sliding) if sliding else None
    stated = json_object(genai.get("sliding_window"))
    size = stated.get("window_size")
    if not isinstance(size, int) or size <= 0:
        return None
    # Without layer_types the builder writes an empty list; every layer then has the window.
    layers = stated.get("layers")
    return Window(size, len(layers) if isinstance(layers, list) and layers else None)


def applies_window(graph: ir.Graph, window: Window) -> bool:
    """Whether `graph` applies `window`.

    If it has GroupQueryAttention: in enough layers, by the operator's attribute. If not: somewhere, by a comparison.
    """
    operators = [node for node in graph if node.op_type == "GroupQueryAttention"]
    if not operators:
        return any(abs(abs(value) - window.size) <= 1 for value in _compared_numbers(graph))
    layers = sum(number_attribute(node, "local_window_size") == window.size for node in operators)
    return layers >= (window.layers or 1)


def lost_soft_cap(graph: ir.Graph, config: dict[str, Any]) -> float | None:
    """The soft cap on attention scores in `config` (Gemma 2) if `graph` does not apply it, else None.

    A graph applies a cap by an attribute of the attention operator, or by a Tanh before each Softmax.
    """
    cap = config.get("attn_logit_softcapping")
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not 0 < cap <= sys.float_info.max:
        return None
    operators = [node for node in graph if node.op_type in _ATTENTION_OPERATORS]
    if operators:
        caps = [number_attribute(node, "softcap") for node in operators]
        is_applied = all(abs(applied - cap) <= _CAP_TOLERANCE * cap for applied in caps)
    else:
        scores = [next(iter(node.inputs), None) for node in graph if node.op_type == "Softmax"]
        is_applied = bool(scores) and all(_comes_from_tanh(value) for value in scores)
    return None if is_applied else float(cap)


def _comes_from_tanh(value: ir.Value | None) -> bool:
    """Whether operators that may stand between a soft cap and a softmax compute `value` from a Tanh."""
    pending, seen = [value], set()
    while pending:
        node = source.producer() if (source := pending.pop()) is not None else None
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if node.op_type == "Tanh":
            return True
        if node.op_type in _BETWEEN_CAP_AND_SOFTMAX:
            pending += node.inputs
    return False


def optional_input(node: ir.Node, index: int) -> ir.Value | None:
    """The input `index` of `node`; None if it is empty or missing, as required ones may be in a damaged file."""
    return node.inputs[index] if index < len(node.inputs) else None


def _position_rows(graph: ir.Graph) -> Iterator[int]:
    """The numbers of rows of the tables that positions index: rotary caches and learned embeddings."""
    for node in graph:
        if node.domain == "com.microsoft" and node.op_type in _COS_CACHE_INPUTS:
            yield from _table_rows(optional_input(node, _COS_CACHE_INPUTS[node.op_type]))
    for lookup in lookups_of(graph, "position_ids"):
        yield from _table_rows(lookup.inputs[0])


def _table_rows(table: ir.Value | None) -> Iterator[int]:
    """The number of rows of `table`, if it is constant and has a known number."""
    if table is not None and is_constant(table) and table.shape is not None and len(table.shape) == 2:
        rows = table.shape[0]
        if isinstance(rows, int):
            yield rows


def _compared_numbers(graph: ir.Graph) -> Iterator[int]:
    """The constant integers that `graph` compares with, adds or subtracts."""
    for node in graph.all_nodes():
        if node.domain == "" and node.op_type in _WINDOW_OPERATORS:
            for value in node.inputs:
                tensor = ir.convenience.get_const_tensor(value) if value is not None else None
                if tensor is not None and tensor.size == 1 and tensor.dtype.is_integer():
                    yield int(tensor.numpy().reshape(()))


PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
# This operator writes the cache in place. It takes one length per row, so it silently misplaces left-padded rows.
IN_PLACE = "GroupQueryAttention"
_ATTENTION_OPERATORS = (IN_PLACE, "Attention")
# Inputs of unsupported layouts, and how to build the supported one.
_OTHER_LAYOUTS = {
    "key_cache.0": "mobius's static cache; build it without --static-cache",
    "block_table": "a paged cache; build it without use_paged_attention",
}


def load_decoder(file: Path, folder: Path) -> Decoder:
    """Load the decoder in the ONNX file `file`. Its weights stay in their files.

    folder: has config.json or genai_config.json.
    The decoder's notices name features that the graph lacks, and limits of the sequence's length (see `limits`).
    Raises SourceError if the file or a data file cannot be read. Raises UnsupportedModelError unless the inputs are
    input_ids, attention_mask, (position_ids) and past_key_values.{i}.key|value, and the outputs logits and
    present.{i}.key|value.
    """
    try:
        model = ir.load(file)
    except Exception as error:  # protobuf and onnx_ir raise many types
        reason = one_line(error, 200)
        raise SourceError(
            f"{file} cannot be read as ONNX ({type(error).__name__}: {reason}); export it again."
        ) from error
    _check_data_files(model, file)
    _check_recursion(model)
    opset = model.opset_imports.get("", 0)
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise UnsupportedModelError(
            f"{file} is written in opset {opset}, but the sampler needs {OLDEST_OPSET} to {NEWEST_OPSET}; "
            f"export the decoder again with opset {OLDEST_OPSET}."
        )
    _check_names(model.graph, file)
    info, notices = _describe(model.graph, folder)
    return Decoder(model, info, foreign=True, notices=notices)


class _Configuration:
    """What the files beside a decoder state about its model.

    text: config.json, or its part for text; {} without the file.
    genai: the part `model` of genai_config.json, and `decoder` the part `decoder` of it; {} without the file.
    """

    def __init__(self, folder: Path) -> None:
        self.text = text_part(read_json(folder / "config.json"))
        self.genai = json_object(read_json(folder / "genai_config.json").get("model"))
        self.decoder = json_object(self.genai.get("decoder"))

    def count(self, *names: str) -> int | None:
        """The first of the settings `names` that is an integer, or None.

        Raises UnsupportedModelError if it is out of range.
        """
        for name in names:
            for where in (self.text, self.decoder, self.genai):
                value = where.get(name)
                if isinstance(value, int) and not isinstance(value, bool):
                    if not 0 <= value <= MOST_TOKENS:
                        raise UnsupportedModelError(
                            f"the configuration states {name} {value!r:.40}, but at most {MOST_TOKENS} is supported; "
                            "correct config.json or genai_config.json."
                        )
                    return value
        return None

    def head_dim(self) -> int | None:
        """The elements of one head, or None if no setting gives them."""
        stated = self.count("head_dim", "head_size")
        if stated:
            return stated
        hidden, heads = self.count("hidden_size", "n_embd"), self.count("num_attention_heads", "n_head")
        return hidden // heads if hidden and heads else None


def _check_data_files(model: ir.Model, file: Path) -> None:
    """Raise SourceError unless files of the folder hold all bytes of all weights, and no attribute is in a file."""
    graphs = (model.graph, *model.functions.values())
    nodes = [node for graph in graphs for node in graph.all_nodes()]
    for node in nodes:
        if any(isinstance(attribute.value, ir.ExternalTensor) for attribute in node.attributes.values()):
            raise SourceError(
                f"{file} keeps an attribute of the node {node.name or node.op_type!r:.60} in another file, but only "
                "weights may be there; do not use this model."
            )
    for tensor in initializer_tensors(model):
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        location = Path(str(tensor.location))
        path, folder = file.parent / location, file.resolve().parent
        start, needed = tensor.offset or 0, int(tensor.nbytes)
        length = needed if tensor.length is None else tensor.length
        fault = ""
        if location.is_absolute() or ".." in location.parts:
            fault = f"keeps weights at '{location}', outside its folder; do not use this model"
        elif not path.is_file():
            fault = f"needs the data file {location}, which is missing from {folder}; fetch it again"
        elif min(start, needed, *map(int, tensor.shape)) < 0 or length < needed or start + length > path.stat().st_size:
            fault = (
                f"keeps the {needed} bytes of {tensor.name!r:.60} in {length} bytes at offset {start} of {location}, "
                f"which has {path.stat().st_size} bytes; fetch it again"
            )
        if fault:
            raise SourceError(f"{file} {fault}.")


def _check_recursion(model: ir.Model) -> None:
    """Raise UnsupportedModelError for a function that calls itself, directly or through others."""
    calls = {
        key: {node.op_identifier() for node in body.all_nodes()} & model.functions.keys()
        for key, body in model.functions.items()
    }
    while calls:
        finite = [key for key, called in calls.items() if not called & calls.keys()]
        if not finite:
            domain, name, _ = next(iter(calls))
            raise UnsupportedModelError(f"the function {domain}.{name} calls itself; export the decoder again.")
        for key in finite:
            del calls[key]


def _check_names(graph: ir.Graph, file: Path) -> None:
    """Raise UnsupportedModelError unless inputs and outputs have the names that `load_decoder` lists."""
    inputs = {str(value.name) for value in graph.inputs}
    outputs = {value.name for value in graph.outputs}
    layers = {match[1] for name in inputs if (match := PAST.fullmatch(name))} or {"0"}
    needed = {"input_ids", "attention_mask"} | _cache_names("past_key_values", layers)
    missing = [*sorted(needed - inputs), *sorted(({"logits"} | _cache_names("present", layers)) - outputs)]
    faults = [
        f"has the input {name}, which belongs to {why}." for name, why in _OTHER_LAYOUTS.items() if name in inputs
    ]
    advice = "export the decoder as text-generation-with-past, with the usual names of inputs and outputs."
    faults += [f"lacks {name}; {advice}" for name in missing]
    faults += [f"has the unknown input {name}; {advice}" for name in sorted(inputs - needed - {"position_ids"})]
    if faults:
        raise UnsupportedModelError(f"{file} {faults[0]}")


def _cache_names(prefix: str, layers: set[str]) -> set[str]:
    """The names of the keys and values of `layers`."""
    return {f"{prefix}.{layer}.{kind}" for layer in layers for kind in ("key", "value")}


def _describe(graph: ir.Graph, folder: Path) -> tuple[DecoderInfo, list[str]]:
    """The description of the decoder, and its notices. Sets the sizes of the cache in the graph's signature."""
    config = _Configuration(folder)
    layers = sum(1 for value in graph.inputs if PAST.fullmatch(value.name or "")) // 2
    kv_dtype = (required_input(graph, "past_key_values.0.key").dtype or ir.DataType.FLOAT).name.lower()
    if kv_dtype not in FLOATS:
        raise UnsupportedModelError(
            f"the decoder keeps its cache as {kv_dtype}, but only {', '.join(FLOATS)} are supported; "
            "export it without a quantised cache."
        )
    states: list[State] = []
    for layer in range(layers):
        key = required_input(graph, f"past_key_values.{layer}.key")
        heads = _cache_size(key, 1, config.count("num_key_value_heads", "num_attention_heads", "n_head"))
        dim = _cache_size(key, 3, config.head_dim())
        names = _cache_names("past_key_values", {str(layer)}) | _cache_names("present", {str(layer)})
        for value in (*graph.inputs, *graph.outputs):
            if value.name in names and value.shape is not None and len(value.shape) == 4:
                value.shape = ir.Shape([value.shape[0], heads, value.shape[2], dim])
        states += key_value_states(layer, kv_dtype, heads, dim, dim)
    length = config.count("max_position_embeddings", "n_positions", "context_length")
    if not length:
        raise UnsupportedModelError(
            f"{folder} does not state the decoder's context length (config.json: max_position_embeddings, "
            "genai_config.json: context_length); add it, or give the folder of the configuration with --tokenizer."
        )
    tokens, notices = sequence_limit(graph, length, window_of(config.text, config.decoder))
    if (cap := lost_soft_cap(graph, config.text)) is not None:
        notices.append(
            f"the decoder does not apply the soft cap of {cap:g} on attention scores that config.json states, so its "
            "logits differ from the model's"
        )
    pasts = [value for value in graph.inputs if PAST.fullmatch(value.name or "")]
    in_place = all({node.op_type for node, _ in value.uses()} == {IN_PLACE} for value in pasts)
    sizes: dict[str, int] = {}  # bytes of weights by type
    for value in graph.initializers.values():
        if value.const_value is not None:
            name = value.const_value.dtype.name.lower()
            sizes[name] = sizes.get(name, 0) + value.const_value.nbytes
    operators = {node.op_type for node in graph}
    least = max((state_window(node) for node in graph), default=0)
    info = DecoderInfo(
        model_type=str(config.text.get("model_type") or config.genai.get("type") or "unknown"),
        kv_form="shared" if in_place else "concat",
        num_layers=layers,
        states=tuple(states),
        kv_dtype=kv_dtype,
        context_length=tokens,
        left_padding=IN_PLACE not in operators,
        weights_dtype=max(sizes, key=lambda name: sizes[name], default="float"),
        attention=next((name for name in _ATTENTION_OPERATORS if name in operators), ""),
        ragged_chunks=not in_place,
        right_padding=in_place and not least,  # a node that caches a window places all rows by the longest one
        buffer_least=least,
    )
    return info, notices


def _cache_size(value: ir.Value, axis: int, configured: int | None) -> int:
    """The size of `axis` of the cache input `value`: as its shape states it, else as configured."""
    size = value.shape[axis] if value.shape is not None and len(value.shape) == 4 else None
    if isinstance(size, int):
        return size
    if configured is None:
        raise UnsupportedModelError(
            f"the cache input {value.name} has the shape {value.shape}, and no configuration gives the size of axis "
            f"{axis}; add config.json to the decoder's folder."
        )
    return configured


def state_window(node: ir.Node) -> int:
    """The number of tokens to which the node limits its cache; 0 for no limit."""
    window = number_attribute(node, "local_window_size")
    return int(window) if number_attribute(node, "sliding_window_cache") and 0 < window <= MOST_TOKENS else 0
