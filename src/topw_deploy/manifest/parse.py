"""Parse the JSON of a manifest, and check the types and ranges of its fields.

No model comes near the bounds. They prevent huge allocations, and integers that no operator can hold.
"""

from __future__ import annotations

import re
import struct
import unicodedata
from dataclasses import fields, replace
from typing import Any

from topw_deploy.errors import ManifestError, ParameterError
from topw_deploy.manifest.contents import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    STATE_KINDS,
    STATUSES,
    TARGETS,
    Check,
    DecoderInfo,
    DecoderManifest,
    FileEntry,
    NotCompared,
    Note,
    SamplerInfo,
    SamplerManifest,
    State,
    TensorSpec,
    Verification,
)
from topw_deploy.manifest.fields import Fields, finite_number, integer, parse_json, sha256, text
from topw_deploy.plain_text import short_repr
from topw_deploy.sampling.beta import depends_on_temperature
from topw_deploy.sampling.parameters import (
    IN_FLOAT32,
    METRICS,
    OPTION_NAMES,
    PARAMETER_NAMES,
    POTENTIALS,
    TopWOptions,
    TopWParameters,
)
from topw_deploy.sampling.rules import carried_rules

MOST_LAYERS = 4096
MOST_STATE_SIZE = 1 << 24  # maximum size of an axis
_MOST_STATES = 4 * MOST_LAYERS
_MOST_AXES = 4  # without the batch axis
MOST_TOKENS = (1 << 31) - 1  # maximum context; operators count tokens in 32 bits
MOST_BUFFER = 1 << 22  # tokens of a buffer, which is allocated for every request
MOST_VOCABULARY = MOST_WIDTH = 1 << 24
_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1
_VERSION = re.compile(r"\d{1,4}\.\d{1,4}")
_SCALARS = (str, int, float, type(None))


def manifest_from_json(content: str) -> DecoderManifest | SamplerManifest:
    """Parse the text of a manifest. Raises a ManifestError that names the first wrong field."""
    try:
        data = parse_json(content)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{MANIFEST_NAME} is not JSON ({error}); export the model again.") from None
    if not isinstance(data, dict):
        raise ManifestError(f"{MANIFEST_NAME} holds a {type(data).__name__}, not an object; export the model again.")
    version = data.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:  # true and 1.0 equal 1
        raise ManifestError(
            f"{MANIFEST_NAME} has format version {short_repr(version)}, this topw_deploy reads {FORMAT_VERSION}; "
            "export the model again or install the version that wrote it."
        )
    try:
        return _manifest(Fields("", data))
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ManifestError(f"{MANIFEST_NAME} is malformed ({reason}); export the model again.") from None


def _manifest(data: Fields) -> DecoderManifest | SamplerManifest:
    files = _files(data.mapping("files"))
    if "model.onnx" not in files:
        raise ManifestError(f"{MANIFEST_NAME} does not list model.onnx; export the model again.")
    defaults = _defaults(data.fields("defaults"))
    shared: dict[str, Any] = {
        "source": _texts("source", data.mapping("source")),
        "libraries": _texts("libraries", data.mapping("libraries")),
        "opset": _opset(data.mapping("opset")),
        "inputs": _tensors("inputs", data.array("inputs")),
        "outputs": _tensors("outputs", data.array("outputs")),
        "sampler": _sampler(data.fields("sampler")),
        "defaults": defaults,
        "default_beta": _default_beta(data.text("default_beta"), defaults),
        "verification": _verification(data.fields("verification")),
        "files": files,
    }
    kind = data.one_of("kind", ("decoder", "sampler"))
    if kind == "decoder":
        return DecoderManifest(decoder=_decoder(data.fields("decoder")), **shared)
    if data.has("decoder"):
        raise ValueError("kind is 'sampler', but there is a decoder")
    return SamplerManifest(**shared)


def verification_from_dict(data: object) -> Verification:
    """Parse what `dataclasses.asdict` returns for a Verification.

    Raises a ValueError that names the first wrong field.
    """
    return _verification(Fields("verification", data))


def _files(data: dict[str, Any]) -> dict[str, FileEntry]:
    found: dict[str, FileEntry] = {}
    folded: dict[str, str] = {}
    for name, entry in data.items():
        given = Fields(f"the entry of {_safe_name(name)}", entry)
        other = folded.setdefault(unicodedata.normalize("NFC", name).casefold(), name)
        if other != name:
            raise ValueError(f"the files {short_repr(other)} and {short_repr(name)} have one name on other systems")
        size = integer(f"size of {name}", given.value("size"), 0, _INT64)
        found[name] = FileEntry(sha256(f"sha256 of {name}", given.value("sha256")), size)
    return found


def _texts(name: str, data: dict[str, Any]) -> dict[str, str]:
    return {key: text(f"{name}.{key}", value) for key, value in data.items()}


def _opset(data: dict[str, Any]) -> dict[str, int]:
    return {domain: integer(f"opset {domain or 'ai.onnx'}", version, 1, _INT32) for domain, version in data.items()}


def _tensors(name: str, data: list[Any]) -> tuple[TensorSpec, ...]:
    found = tuple(_tensor(Fields(f"{name}[{index}]", item)) for index, item in enumerate(data))
    if len({spec.name for spec in found}) != len(found):
        raise ValueError(f"{name} lists a tensor twice")
    return found


def _sampler(data: Fields) -> SamplerInfo:
    data.refuse_others(_names(SamplerInfo))
    hidden = data.value("hidden_size")
    return SamplerInfo(
        branches=data.boolean("branches"),
        vocab_size=data.integer("vocab_size", 1, MOST_VOCABULARY),
        hidden_size=None if hidden is None else data.integer("hidden_size", 1, MOST_WIDTH),
        table_form=data.text("table_form"),
        options=_options(data.fields("options")),
        outputs=data.texts("outputs"),
        neighbour_bound=data.boolean("neighbour_bound"),
        rules=_rules(data),
    )


def _rules(data: Fields) -> tuple[str, ...]:
    """Return the names of the rules that the function can apply."""
    found = data.texts("rules")
    try:
        if found == carried_rules(found):
            return found
    except ParameterError:
        pass
    raise ValueError(
        f"sampler.rules is {short_repr(list(found))}, but must be top_w and other rules, in the order of codes"
    )


def _defaults(data: Fields) -> TopWParameters:
    """Return the default parameters, which must also be valid when rounded to float32, the graph's type."""
    data.refuse_others(PARAMETER_NAMES)
    given = {name: data.number(name) for name in PARAMETER_NAMES}
    found = TopWParameters(**given)
    try:
        rounded = {name: struct.unpack("<f", struct.pack("<f", float(value)))[0] for name, value in given.items()}
        TopWParameters(**rounded)
    except (OverflowError, ValueError):
        raise ValueError(f"defaults are {short_repr(given)}, which must be in range {IN_FLOAT32}") from None
    return found


def _default_beta(found: str, defaults: TopWParameters) -> str:
    """Return Manifest.default_beta, whose value at the default temperature must be the one in `defaults`."""
    if not found:
        return found
    if not depends_on_temperature(found):
        raise ValueError(f"default_beta is {short_repr(found)}, which does not depend on the temperature")
    at_default = replace(defaults, beta=found).beta  # type: ignore[arg-type]  # text is replaced by its number
    if at_default != defaults.beta:
        raise ValueError(
            f"default_beta is {short_repr(found)}, {at_default!r} at the default temperature, but defaults.beta is "
            f"{defaults.beta!r}"
        )
    return found


def _decoder(data: Fields) -> DecoderInfo:
    data.refuse_others(_names(DecoderInfo))
    layers = data.integer("num_layers", 1, MOST_LAYERS)
    weights = data.mapping("weights")
    return DecoderInfo(
        model_type=data.text("model_type"),
        kv_form=data.text("kv_form"),
        num_layers=layers,
        states=_states(data),
        kv_dtype=data.text("kv_dtype"),
        context_length=data.integer("context_length", 1, MOST_TOKENS),
        left_padding=data.boolean("left_padding"),
        weights_dtype=data.text("weights_dtype"),
        attention=data.text("attention"),
        right_padding=data.boolean("right_padding"),
        ragged_chunks=data.boolean("ragged_chunks"),
        most_columns=data.integer("most_columns", 0, MOST_TOKENS),
        buffer_step=data.integer("buffer_step", 0, MOST_BUFFER),
        buffer_least=data.integer("buffer_least", 0, MOST_BUFFER),
        target=data.one_of("target", TARGETS),
        least_onnxruntime=_version(data.text("least_onnxruntime")),
        weights={kind: integer(f"weights {kind}", count, 0, _INT64) for kind, count in weights.items()},
        quantisation=_quantisation(data.mapping("quantisation")),
    )


def _version(given: str) -> str:
    if given and not _VERSION.fullmatch(given):
        raise ValueError(f"decoder.least_onnxruntime is {short_repr(given)}, not a version such as 1.29")
    return given


def _states(data: Fields) -> tuple[State, ...]:
    found = tuple(_state(given) for given in data.objects("states", _names(State)))
    if not 1 <= len(found) <= _MOST_STATES:
        raise ValueError(f"decoder.states has {len(found)} entries, not 1 to {_MOST_STATES}")
    names = [name for state in found for name in (state.past, state.present)]
    if len(set(names)) != len(names):
        raise ValueError("decoder.states names a tensor twice")
    return found


def _state(data: Fields) -> State:
    shape = tuple(integer("an axis of a state", size, 0, MOST_STATE_SIZE) for size in data.array("shape"))
    if not 1 <= len(shape) <= _MOST_AXES or shape.count(0) > 1:
        raise ValueError(
            f"a state has the shape {short_repr(list(shape))}, not 1 to {_MOST_AXES} axes with at most one 0"
        )
    return State(
        layer=data.integer("layer", 0, MOST_LAYERS - 1),
        kind=data.one_of("kind", STATE_KINDS),
        past=data.text("past"),
        present=data.text("present"),
        dtype=data.text("dtype"),
        shape=shape,
        window=data.integer("window", 0, MOST_TOKENS),
        shared_by=tuple(
            integer("a layer of shared_by", layer, 0, MOST_LAYERS - 1) for layer in data.array("shared_by")
        ),
    )


def _verification(data: Fields) -> Verification:
    data.refuse_others(_names(Verification))
    return Verification(
        status=data.one_of("status", STATUSES),
        checks=tuple(_check(index, item) for index, item in enumerate(data.array("checks"))),
        not_compared=tuple(
            NotCompared(given.text("name"), given.text("reason"))
            for given in data.objects("not_compared", _names(NotCompared))
        ),
        notes=tuple(Note(given.text("name"), given.text("text")) for given in data.objects("notes", _names(Note))),
        median_distance=_median(data.value("median_distance")),
    )


def _median(given: object) -> float | None:
    if given is not None and finite_number("median_distance", given) <= 0:
        raise ValueError(f"median_distance is {short_repr(given)}, not a number > 0")
    return None if given is None else finite_number("median_distance", given)


def _names(part: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(part))


def _options(data: Fields) -> TopWOptions:
    data.refuse_others(OPTION_NAMES)
    return TopWOptions(
        metric=data.one_of("metric", METRICS),
        potential=data.one_of("potential", POTENTIALS),
        **{name: data.integer(name, 1, _INT32) for name in ("top_m", "alt_iters", "knn_k")},
    )


def _tensor(data: Fields) -> TensorSpec:
    shape = tuple(
        text("a dimension", size) if isinstance(size, str) else integer("a dimension", size, 0, _INT64)
        for size in data.array("shape")
    )
    return TensorSpec(data.text("name"), data.text("dtype"), shape)


def _quantisation(data: dict[str, Any]) -> dict[str, Any]:
    for name, value in data.items():
        what = f"quantisation.{name}"
        if isinstance(value, list):
            for item in value:
                text(f"an item of {what}", item)
        elif isinstance(value, str):
            text(what, value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            finite_number(what, value)
        elif not isinstance(value, _SCALARS):
            raise ValueError(f"{what} is {short_repr(value)}, not a number, text, true, false, null or list of texts")
    return data


def _check(index: int, data: object) -> Check:
    given = Fields(f"checks[{index}]", data).refuse_others(_names(Check))
    try:
        return Check(
            name=given.text("name"),
            passed=given.boolean("passed"),
            difference=given.number("difference"),
            bound=given.number("bound"),
            detail=given.text("detail"),
        )
    except ValueError as error:
        raise ValueError(f"a check has a value of the wrong type: {error}") from None


def _safe_name(name: str) -> str:
    """Return `name`. Raises ManifestError unless it is a plain path inside the folder."""
    parts = name.split("/")
    if not name or "\\" in name or ":" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ManifestError(
            f"the manifest lists the file {short_repr(name)}, which is not a plain path inside the folder; "
            "do not use this folder."
        )
    return name
