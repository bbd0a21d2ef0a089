"""`topw_manifest.json`: the description of an export and the hashes of its files.

The manifest is written last: a folder without a valid one is unfinished and does not load. The types state the bounds
of each field. No model comes near them: they prevent huge allocations, and integers that no operator can hold.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Generic, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from topw_deploy.dtypes import ELEMENT_TYPES
from topw_deploy.errors import ManifestError
from topw_deploy.folders import atomic_file, open_inside, open_regular
from topw_deploy.sampling.parameters import TopWOptions, TopWParameters
from topw_deploy.sampling.rules import RULES, carried_rules

MANIFEST_NAME = "topw_manifest.json"
ROWS = "rows"
"""The sampler's dimension in graphs that can draw after each of a row's last tokens."""
MODEL_NAME = "model.onnx"
NATIVE_ATTENTION = "topw::GroupQueryAttention"
"""`DecoderInfo.attention` if all attention is in this function, whose native operator computes each row alone."""
FORMAT_VERSION = 1
MOST_TOKENS = (1 << 31) - 1  # maximum context; operators count tokens in 32 bits
_MOST_BYTES = 16 << 20  # of a manifest, which has a few KB
_MOST_TEXT, _MOST_JSON = 256 << 20, 16 << 20  # bytes; published tokenizers have up to 35 MB, other JSON files up to 2
_MOST_LAYERS = 4096

Target = Literal["onnxruntime", "tensorrt"]
Status = Literal["provisional", "passed", "partial", "skipped"]
StateKind = Literal["full", "window", "latent", "convolution", "recurrent"]
SettingUse = Literal["applied", "without effect", "ignored"]
TokenizerOrigin = Literal["copied", "compared", "adopted", "converted"]
KV_FORMS = ("concat", "static", "shared")
TARGETS, STATE_KINDS = get_args(Target), get_args(StateKind)

Text = Annotated[str, Meta(max_length=1 << 16)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Tokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
BufferTokens = Annotated[int, Meta(ge=0, le=1 << 22)]  # a buffer is allocated for every request
Layer = Annotated[int, Meta(ge=0, lt=_MOST_LAYERS)]
Size = Annotated[int, Meta(ge=1, le=1 << 24)]  # of the vocabulary and of embeddings
Version = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
FileName = Annotated[str, Meta(pattern=r"^(?!.*(^|/)\.{0,2}(/|$))[^\\:\x00]+$", max_length=1 << 12)]
"""A plain path inside the folder."""


class FileEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A file that the manifest lists.

    sha256: in hexadecimal.
    size: in bytes.
    """

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    size: Count


class TensorSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """An input or output of the graph.

    dtype: lower-case ONNX element type, such as `float` or `int64`.
    shape: dimensions, or their names.
    """

    name: Text
    dtype: Text
    shape: tuple[Count | Text, ...]


class State(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor [batch, *shape] that a layer keeps between calls.

    layer: the layer that writes the tensor. In models that repeat layers, each repetition has a number of its own.
    kind: one of STATE_KINDS.
        full: keys or values of all tokens.
        window: keys or values of the last `window` tokens.
        latent: keys and values of all tokens, compressed.
        convolution: the last columns of the input of a causal convolution, a mean of a block of tokens, or an n-gram.
        recurrent: the state of a recurrence.
        All but `full` and `latent` have a fixed size and start as zeros.
    past, present: names of the graph's input and output for this tensor.
    dtype: lower-case ONNX element type.
    shape: the shape of one row. 0 stands for the axis of tokens; at most one axis is 0.
    window: for the kind `window`, the number of tokens that a query sees, its own included; otherwise 0. The operator
        counts padding as tokens when it drops old ones, so the rows of a call must have equal lengths.
    shared_by: later layers that also read the tensor.
    """

    layer: Layer
    kind: StateKind
    past: Text
    present: Text
    dtype: Text
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 24)], ...], Meta(min_length=1, max_length=4)]
    window: Tokens = 0
    shared_by: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        if self.shape.count(0) > 1:
            raise ValueError(f"the state {self.past} has the shape {list(self.shape)} with more than one 0")

    @property
    def grows(self) -> bool:
        """Whether the tensor's size depends on the number of tokens."""
        return 0 in self.shape

    def sized(self, tokens: int) -> tuple[int, ...]:
        """Return the shape of a row that has room for `tokens` tokens."""
        return tuple(tokens if size == 0 else size for size in self.shape)

    def row_bytes(self, tokens: int) -> int:
        """Return the bytes of a row that has room for `tokens` tokens."""
        return math.prod(self.sized(tokens)) * ELEMENT_TYPES[self.dtype].bits // 8


def key_value_states(
    layer: int,
    dtype: str,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    window: int = 0,
    shared_by: tuple[int, ...] = (),
) -> tuple[State, State]:
    """Return the states of an attention layer's keys and values, each [batch, heads, tokens, dim].

    window: the number of tokens that are kept; 0 keeps all.
    """

    def state(part: str, dim: int) -> State:
        return State(
            layer=layer,
            kind="window" if window else "full",
            past=f"past_key_values.{layer}.{part}",
            present=f"present.{layer}.{part}",
            dtype=dtype,
            shape=(heads, window, dim),
            window=window,
            shared_by=shared_by,
        )

    return state("key", key_dim), state("value", value_dim)


class DecoderInfo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the runtime drives the decoder (docs/contract/graph.md, section 8).

    model_type: transformers' name of the architecture.
    kv_form: one of KV_FORMS.
        concat: the graph returns the past followed by the new tokens.
        static: the graph updates one buffer in place, and has the length of each row as an input.
        shared: like static, in another exporter's graph, with attention_mask instead of lengths.
    states: what the layers keep between calls, in layer order.
    kv_dtype: ONNX element type of keys and values, "float" or "float16".
    context_length: maximum number of tokens of a sequence.
    left_padding, right_padding: whether batches can be padded on that side. `concat` can be padded on the left,
        `shared` on the right, and `static`, which has row lengths, on neither.
    weights_dtype: the type of the weights: an ONNX element type such as "float", or "int4" or "int8" if quantised
        (of most products, where a GGUF file's codes are kept).
    attention: the operator that reads the cache: NATIVE_ATTENTION, "GroupQueryAttention", "Attention" or "".
    ragged_chunks: whether one call can append several tokens to each row of a batch. If not, a call takes several
        tokens only for empty caches, or for a single row, unless the session `attends_alone`.
    most_columns: maximum number of tokens per row and call; 0 for any.
    buffer_step: tokens. The length of a buffer is the smallest sufficient multiple of this number. 0 if the cost of a
        step does not depend on the length.
    buffer_least: minimum length of a buffer in tokens; 0 for any. Operators whose sliding window lies in the buffer
        refuse shorter buffers.
    target: one of TARGETS.
    least_onnxruntime: the first version that runs the graph, such as "1.29"; "" for any supported version.
    weights: bytes of initializers by element type.
    quantisation: the fields of export.quantise.Quantisation; {} if this package did not quantise the weights.
    """

    model_type: Text
    kv_form: Text
    num_layers: Annotated[int, Meta(ge=1, le=_MOST_LAYERS)]
    states: Annotated[tuple[State, ...], Meta(min_length=1, max_length=4 * _MOST_LAYERS)]
    kv_dtype: Text
    context_length: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    left_padding: bool
    weights_dtype: Text = "float"
    attention: Text = ""
    right_padding: bool = False
    ragged_chunks: bool = True
    most_columns: Tokens = 0
    buffer_step: BufferTokens = 0
    buffer_least: BufferTokens = 0
    target: Target = "onnxruntime"
    least_onnxruntime: Annotated[str, Meta(pattern=r"^(\d{1,4}\.\d{1,4})?\Z")] = ""
    weights: dict[Text, Count] = {}
    quantisation: dict[Text, Text | int | float | bool | list[Text] | None] = {}

    def __post_init__(self) -> None:
        _refuse_repeats("decoder.states", [name for state in self.states for name in (state.past, state.present)])

    def state_bytes(self) -> dict[str, tuple[int, int]]:
        """Return {kind: (bytes of a row at any length, additional bytes per token)} for the decoder's kinds."""
        sizes: dict[str, tuple[int, int]] = {}
        for kind in STATE_KINDS:
            states = [state for state in self.states if state.kind == kind and state.dtype in ELEMENT_TYPES]
            fixed = sum(state.row_bytes(0) for state in states)
            if states:
                sizes[kind] = fixed, sum(state.row_bytes(1) for state in states) - fixed
        return sizes

    @property
    def evicts(self) -> bool:
        """Whether a layer's state drops the tokens that have left its window.

        Prompts of different lengths must then be read one by one.
        """
        return any(state.window for state in self.states)

    @property
    def recurs(self) -> bool:
        """Whether a state has a fixed size.

        Each token must then be read exactly once, because it changes that state.
        """
        return any(not state.grows for state in self.states)


class StoredArray(Struct, frozen=True, forbid_unknown_fields=True):
    """A constant of the graph, in row-major order at `offset` of a listed file."""

    file: FileName
    offset: Count
    dtype: Literal["float", "float16", "bfloat16", "uint8"]
    shape: Annotated[tuple[Size, ...], Meta(min_length=1, max_length=2)]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_TYPES[self.dtype].bits // 8


class EmbeddingTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The constants behind the sampler's token distances (docs/contract/graph.md, section 8).

    rows: embeddings [V, d], or codes uint8 [V, d * bits / 8] with the low bits of a byte first.
    transposed: whether `rows` is [d, V].
    bits, block_size: of codes; 0 for plain embeddings.
    scales: of codes, [V, blocks].
    zero_points: of codes, packed like them; None for 2 ** (bits - 1).
    mean, inverse_std: statistics float32 [d].
    """

    rows: StoredArray
    mean: StoredArray
    inverse_std: StoredArray
    transposed: bool = False
    bits: Literal[0, 4, 8] = 0
    block_size: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    scales: StoredArray | None = None
    zero_points: StoredArray | None = None

    def check_sizes(self, vocabulary: int, width: int) -> None:
        """Raise ValueError unless the arrays have the sizes of `vocabulary` or more embeddings of `width` numbers."""
        # A table may have rows beyond the logits.
        stored = max(vocabulary, self.rows.shape[-1 if self.transposed else 0])
        wanted = {"rows": (stored, width), "mean": (width,), "inverse_std": (width,)}
        if self.transposed:
            wanted["rows"] = (width, stored)
        if self.bits:
            blocks = -(-width // max(self.block_size, 1))
            wanted["rows"], wanted["scales"] = (stored, -(-width * self.bits // 8)), (stored, blocks)
            if self.zero_points is not None:
                wanted["zero_points"] = (stored, -(-blocks * self.bits // 8))
        for name, shape in wanted.items():
            array = getattr(self, name)
            in_codes = bool(self.bits) and name in ("rows", "zero_points")
            if array is None or array.shape != shape or in_codes != (array.dtype == "uint8"):
                raise ValueError(f"the table's {name} is not an array {list(shape)} of the right type")


class Lookup(Struct, frozen=True, forbid_unknown_fields=True):
    """A lookup of embeddings in blocks of codes (`GatherBlockQuantized` over uint8).

    width: number of weights in a row.
    """

    block_size: Size
    width: Size
    has_zero_points: bool


class SamplerInfo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of the `topw::TopWSample` node.

    branches: whether the function skips work by branches; without, it has no control flow.
    hidden_size: the width of the embeddings; None for the uniform metric.
    table_form: the operator and attributes that read an embedding, "" for the uniform metric.
    outputs: names of the sampler's outputs in the graph.
    neighbour_bound: whether the node has the neighbour bound, as input 16.
    rules: the sampling rules that the function can apply, in the order of their codes.
    table: the embeddings; None for the uniform metric, and for a table that cannot be read outside the graph.
    """

    branches: bool
    vocab_size: Size
    hidden_size: Size | None
    table_form: Text
    options: TopWOptions
    outputs: tuple[Text, ...]
    neighbour_bound: bool = False
    rules: tuple[Text, ...] = tuple(RULES)
    table: EmbeddingTable | None = None

    def __post_init__(self) -> None:
        if self.rules != carried_rules(self.rules):
            raise ValueError(f"rules is {list(self.rules)}, but must be in the order of codes")
        if self.table is not None:
            self.table.check_sizes(self.vocab_size, self.hidden_size or 0)

    @property
    def geometry(self) -> tuple[str, int | None]:
        """(metric, width of the embeddings)."""
        return self.options.metric, self.hidden_size


class Check(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a comparison.

    difference: the largest difference that was found.
    bound: the largest difference with which the check passes.
    """

    name: Text
    passed: bool
    difference: float
    bound: float
    detail: Text = ""


class NotCompared(Struct, frozen=True, forbid_unknown_fields=True):
    """A comparison that was not possible, and why."""

    name: Text
    reason: Text


class Note(Struct, frozen=True, forbid_unknown_fields=True):
    """A measurement that cannot fail, for information."""

    name: Text
    text: Text


class Verification(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The comparison of an export with its source. If the comparison fails, there is no folder.

    status: a Status.
        provisional: not yet compared. The folder does not load.
        passed: all checks ran and passed.
        partial: something was not compared, or a failed check limits how the export can be used (see its detail).
        skipped: the user did not ask for a comparison.
    checks: comparisons that can fail.
    not_compared: comparisons that were not possible. If there are any, the status is "partial".
    notes: measurements, which do not affect the status.
    median_distance: median distance of likely pairs of tokens (sampling.geometry), > 0; None if not measured.
    """

    status: Status
    checks: tuple[Check, ...] = ()
    not_compared: tuple[NotCompared, ...] = ()
    notes: tuple[Note, ...] = ()
    median_distance: Annotated[float, Meta(gt=0)] | None = None


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of `DecoderManifest` and `SamplerManifest`.

    source: `id`, `revision` and `route` of the model, and `types` of a GGUF file's tensors ("210 Q4_1, 61 F32").
    libraries: versions of topw_deploy and of the libraries used for the export.
    opset: opset version by domain.
    defaults: the sampler's parameters for callers that give none.
    default_beta: the formula of the default `beta` if it depends on the temperature, else "". `defaults` then has its
        value at the default temperature.
    lookups: the graph's lookups in blocks of codes.
    files: the files of the folder by path, without the manifest itself.
    """

    format_version: int = FORMAT_VERSION
    source: dict[Text, Text]
    libraries: dict[Text, Text]
    opset: dict[Text, Version]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sampler: SamplerInfo
    defaults: TopWParameters
    default_beta: Text = ""
    lookups: tuple[Lookup, ...] = ()
    verification: Verification = Verification(status="skipped")
    files: dict[FileName, FileEntry] = {}

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs"):
            _refuse_repeats(name, [spec.name for spec in getattr(self, name)])
        if self.default_beta and replace(self.defaults, beta=self.default_beta) != self.defaults:  # type: ignore[arg-type]
            raise ValueError(f"default_beta is {self.default_beta!r}, which is not defaults.beta {self.defaults.beta}")

    @property
    def kind(self) -> str:
        """`decoder` or `sampler`."""
        return str(self.__struct_config__.tag)

    @property
    def median_distance(self) -> float | None:
        """Median distance of likely pairs of tokens (sampling.geometry); None if it was not measured."""
        return 1.0 if self.sampler.options.metric == "uniform" else self.verification.median_distance

    @property
    def stated_defaults(self) -> dict[str, Any]:
        """The default parameters as the user gave them: `beta` as a formula if it depends on the temperature."""
        return {**asdict(self.defaults), **({"beta": self.default_beta} if self.default_beta else {})}

    def to_json(self) -> str:
        """Return the text of topw_manifest.json."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"


class IgnoredTensors(Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors of a checkpoint that the model does not read.

    names: their name, with `*` for each number between dots.
    count: the number of tensors with such a name.
    rule: why they can be ignored.
    """

    names: Text
    count: Count
    rule: Text


class SourceTensors(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of each tensor of a checkpoint.

    read: number of tensors that are a weight of the model, or several.
    merged: number of tensors that are a part of a weight (codes and scales, stacked experts) or a copy of a tied one.
    ignored: the other tensors.
    """

    read: Count
    merged: Count = 0
    ignored: tuple[IgnoredTensors, ...] = ()


class SourceTokens(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of the source's tokenizer.

    made: how tokenizer.json was made.
        copied: unchanged, and not compared, because transformers cannot load it.
        compared: unchanged; each added token is encoded and decoded as by transformers.
        adopted: written as transformers loads it, with tokens or flags that other files state.
        converted: from other files than tokenizer.json.
    added: number of added tokens.
    templates: number of chat templates.
    """

    made: TokenizerOrigin
    added: Count
    templates: Count


class DecoderManifest(Manifest, tag="decoder", frozen=True, kw_only=True):
    """The manifest of a decoder with a sampler.

    source_tensors: what became of the checkpoint's tensors; None for another exporter's decoder.
    source_tokens: what became of the tokenizer; None in older manifests.
    settings: how the runtime uses each key of the source's generation_config.json.
        applied: a default of requests.
        without effect: a value that has no effect on tokens, such as `num_beams` 1, or null.
        ignored: a method that the runtime does not have, or a parameter of a rule that the file does not name.
    """

    decoder: DecoderInfo
    source_tensors: SourceTensors | None = None
    source_tokens: SourceTokens | None = None
    settings: dict[Text, SettingUse] = {}


class SamplerManifest(Manifest, tag="sampler", frozen=True, kw_only=True):
    """The manifest of a sampler without a decoder."""


class _Version(Struct):
    format_version: Any = None


def manifest_from_json(content: str | bytes) -> DecoderManifest | SamplerManifest:
    """Parse the text of a manifest. Raises a ManifestError that names the first wrong field."""
    try:
        version = msgspec.json.decode(content, type=_Version).format_version
        if type(version) is int and version == FORMAT_VERSION:  # true and 1.0 equal 1
            manifest = msgspec.json.decode(content, type=DecoderManifest | SamplerManifest)
            if MODEL_NAME in manifest.files:
                return manifest
            raise ValueError(f"it does not list {MODEL_NAME}")
    except (ValueError, RecursionError) as error:
        raise ManifestError(
            f"{MANIFEST_NAME} is malformed ({str(error)[:400].rstrip('.')}); export the model again."
        ) from None
    raise ManifestError(
        f"{MANIFEST_NAME} has format version {version!r:.60}, this topw_deploy reads {FORMAT_VERSION}; "
        "export the model again or install the version that wrote it."
    )


def load_manifest(folder: str | Path, *, unfinished: bool = False) -> DecoderManifest | SamplerManifest:
    """Read the manifest of `folder`, which may be a link, and check the sizes of the files that it lists.

    Hashes are not checked, because loading must not read gigabytes; use `check_hashes`.
    unfinished: also accept an export that is still being verified, or whose verification did not finish.
    Raises ManifestError for a missing or malformed manifest, for a listed file that is missing, not regular, linked
    or of another size.
    """
    folder = Path(folder)
    path = folder / MANIFEST_NAME
    try:
        with open_inside(folder, MANIFEST_NAME) as stream:
            raw = stream.read(_MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        if folder.is_dir():
            raise ManifestError(
                f"{folder} has no {MANIFEST_NAME}: it is not a finished export; run topw-export."
            ) from None
        what = "is a file" if folder.exists() else "does not exist"
        raise ManifestError(f"{folder} {what}; give the folder that topw-export wrote.") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise _read_error(repr(str(path)), error) from None
    if len(raw) > _MOST_BYTES:
        raise ManifestError(
            f"{path} is larger than {_MOST_BYTES} bytes, so it is not a manifest; export the model again."
        )
    manifest = manifest_from_json(raw)
    if manifest.verification.status == "provisional" and not unfinished:
        raise ManifestError(f"{folder} is an export whose verification did not finish; export the model again.")
    for name, entry in manifest.files.items():
        open_listed(folder, name, entry).close()
    return manifest


def load_decoder_manifest(folder: str | Path, *, unfinished: bool = False) -> DecoderManifest:
    """Read the manifest like `load_manifest`. Raises its errors, and ManifestError if the folder has no decoder."""
    return ModelFolder(folder, DecoderManifest, unfinished=unfinished).manifest


def _read_error(place: str, error: Exception) -> ManifestError:
    reason = getattr(error, "strerror", None) or error
    return ManifestError(f"{place} cannot be read: {reason}; copy the folder again, or export the model again.")


def open_listed(folder: Path, name: str, entry: FileEntry) -> BinaryIO:
    """Open the file `name` of a manifest, and check its kind and size.

    Raises ManifestError if the file is missing, unreadable, not regular, linked, or of another size than in `entry`.
    """
    try:
        stream = open_inside(folder, name)
    except (FileNotFoundError, NotADirectoryError):
        raise ManifestError(
            f"{name} is listed in {MANIFEST_NAME} but missing from {folder}; export or copy it again."
        ) from None
    except OSError as error:
        raise _read_error(f"{name} in {folder}", error) from None
    size = os.fstat(stream.fileno()).st_size
    if size != entry.size:
        stream.close()
        raise ManifestError(
            f"{name} has {size} bytes, the manifest says {entry.size}: "
            "it was changed or cut short; export or copy the folder again."
        )
    return stream


def check_hashes(folder: str | Path, manifest: Manifest) -> None:
    """Compare each listed file with its SHA-256. Raises ManifestError for the first that differs or cannot be read."""
    for name, entry in manifest.files.items():
        with open_listed(Path(folder), name, entry) as stream:
            sha256 = sha256_of_stream(stream)
        if sha256 != entry.sha256:
            raise ManifestError(
                f"{name} has SHA-256 {sha256[:16]}…, the manifest says {entry.sha256[:16]}…: "
                "the file was changed; export or copy the folder again."
            )


def describe_files(
    folder: str | Path, names: Iterable[str], known: dict[str, str] | None = None
) -> dict[str, FileEntry]:
    """Return the hash and the size of each named file. known: hashes that are already computed, by name."""
    folder, known = Path(folder), known or {}
    return {
        name: FileEntry(known.get(name) or sha256_of(folder / name), (folder / name).stat().st_size)
        for name in sorted(names)
    }


def save_manifest(folder: str | Path, manifest: Manifest) -> None:
    """Write the manifest into `folder` in one step, so that readers never see half of it."""
    with atomic_file(Path(folder) / MANIFEST_NAME) as stream:
        stream.write(manifest.to_json().encode("utf-8"))


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a regular file. Raises OSError for links and other kinds of file."""
    with open_regular(path) as stream:
        return sha256_of_stream(stream)


def sha256_of_stream(stream: BinaryIO) -> str:
    """Return the hexadecimal SHA-256 of an open file."""
    return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]  # BufferedReader


def _refuse_repeats(name: str, tensors: list[str]) -> None:
    if len(set(tensors)) != len(tensors):
        raise ValueError(f"{name} names a tensor twice")


M_co = TypeVar("M_co", bound=Manifest, covariant=True)


class ModelFolder(Generic[M_co]):
    """A folder that was checked against its manifest. Only regular files that the manifest lists are opened, no links.

    Raises ManifestError if the folder is missing, unfinished, changed, or not of kind `wanted`.
    """

    def __init__(self, path: str | Path, wanted: type[M_co], *, unfinished: bool = False) -> None:
        """unfinished: also open an export that is still being verified."""
        self.path = Path(path)
        manifest = load_manifest(self.path, unfinished=unfinished)
        if not isinstance(manifest, wanted):
            is_decoder = isinstance(manifest, DecoderManifest)
            found = "a whole model" if is_decoder else "a sampler without a decoder"
            other = "TopWModel" if is_decoder else "TopWSampler"
            raise ManifestError(f"{self.path} holds {found}; give another folder, or open it with {other}.")
        self.manifest: M_co = manifest

    @property
    def model(self) -> Path:
        """The path of the ONNX file."""
        return self.path / MODEL_NAME

    def has(self, name: str) -> bool:
        """Whether the manifest lists a file."""
        return name in self.manifest.files

    def open(self, name: str) -> BinaryIO:
        """Open a listed file. Raises ManifestError if the file is not listed, or is not as the manifest says."""
        if not self.has(name):
            raise ManifestError(f"{name} is not listed in {self.path / MANIFEST_NAME}; export the model again.")
        return open_listed(self.path, name, self.manifest.files[name])

    def read_text(self, name: str, most: int = _MOST_TEXT) -> str:
        """Read a listed file. Raises ManifestError if the file is not listed, not UTF-8 or larger than `most` bytes."""
        if self.has(name) and self.manifest.files[name].size > most:
            raise ManifestError(
                f"{self.path / name} has {self.manifest.files[name].size} bytes, but may have at most {most}; "
                "do not use this folder."
            )
        try:
            with TextIOWrapper(self.open(name), encoding="utf-8") as stream:
                return stream.read()
        except UnicodeDecodeError:
            raise ManifestError(f"{self.path / name} is not UTF-8; export or copy the folder again.") from None
        except OSError as error:
            raise _read_error(str(self.path / name), error) from None

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a file's JSON object; {} if the file is not listed. Raises ManifestError for anything else."""
        if not self.has(name):
            return {}
        try:
            data = json.loads(self.read_text(name, _MOST_JSON))
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{self.path / name} is not JSON ({error}); export or copy the folder again.") from None
        if not isinstance(data, dict):
            raise ManifestError(f"{self.path / name} holds a {type(data).__name__}, not an object; export it again.")
        return data
