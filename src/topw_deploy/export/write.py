"""Write a graph with its weights. Weights of a large model go into data files, each weight once."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import onnx_ir as ir
from msgspec import structs

from topw_deploy.dtypes import ELEMENT_TYPES
from topw_deploy.errors import ExportError, ManifestError, UnsupportedModelError
from topw_deploy.export.graph import (
    Decoder,
    byte_blocks,
    constant_of,
    external_files,
    initializer_tensors,
    initializers,
    number_attribute,
    producer,
)
from topw_deploy.export.options import ExportOptions, ExportReport, SamplerOptions
from topw_deploy.export.sampler.node import OP_TYPE, SamplerSpec
from topw_deploy.export.source.resolve import Source
from topw_deploy.folders import map_file
from topw_deploy.install import library_versions
from topw_deploy.manifest import (
    MODEL_NAME,
    DecoderManifest,
    EmbeddingTable,
    Lookup,
    SamplerInfo,
    StoredArray,
    TensorSpec,
    Verification,
    describe_files,
    manifest_from_json,
)
from topw_deploy.progress import Advance

DATA_FILE = "model.onnx_data"
_OTHER_DATA_FILE = "model.topw.onnx_data"  # if the decoder's own data has a name made from DATA_FILE
# Bytes: smaller tensors stay in the graph, because shape inference needs shapes, axes and scalars there.
_INLINE_BELOW = 1024
_PAGE = 4096  # bytes: tensors larger than _ALIGNED_ABOVE start on a page, so that they can be mapped
_CACHE_LINE = 64  # bytes: all others start on a line of the processor's cache, because products read them in place
_ALIGNED_ABOVE = 1 << 20  # bytes, as in onnx_ir
# Up to this many bytes, weights stay in model.onnx: one file is easier to copy and compare. Above, the runtime maps a
# data file instead of parsing a copy (59 instead of 89 MB for 35 MB of 4-bit weights), and tools can edit the graph
# without reading weights. Protobuf's limit is 2 GiB.
EXTERNAL_ABOVE = 16 << 20

_QUANTISED = {
    "MatMulNBits": "bits",
    "MatMulNBitsWithOffsets": "bits",
    "GatherBlockQuantized": "bits",
    "QMoE": "expert_weight_bits",
}
_CODE_TYPES = (ir.DataType.UINT4, ir.DataType.INT4, ir.DataType.INT8)
_COPY_PART = 64 << 20  # bytes
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP}  # other device, or no hard links


@dataclass(frozen=True)
class Slot:
    """The place of a weight in a data file. offset, length: in bytes."""

    value: ir.Value
    file: str
    offset: int
    length: int

    @property
    def tensor(self) -> ir.TensorProtocol:
        return constant_of(self.value)

    @property
    def name(self) -> str:
        return str(self.value.name)


def lay_out(values: Iterable[ir.Value], taken: Iterable[str] = (), max_shard_size: int | None = None) -> list[Slot]:
    """Assign a slot to each weight of at least 1 KiB, in order.

    taken: names of the decoder's own data files, which no slot uses.
    max_shard_size: maximum bytes of a file, exceeded only by a single larger weight; None writes one file.
    """
    places: list[tuple[ir.Value, int, int]] = []
    shard = end = 0
    for value in values:
        size = constant_of(value).nbytes
        if size < _INLINE_BELOW:
            continue
        step = _PAGE if size > _ALIGNED_ABOVE else _CACHE_LINE
        offset = -(-end // step) * step
        if max_shard_size is not None and end > 0 and offset + size > max_shard_size:
            shard, offset = shard + 1, 0
        end = offset + size
        places.append((value, shard, offset))
    names = _file_names(DATA_FILE, shard + 1)
    if not set(names).isdisjoint(taken):
        names = _file_names(_OTHER_DATA_FILE, shard + 1)
    return [Slot(value, names[shard], offset, constant_of(value).nbytes) for value, shard, offset in places]


def _write_data(slots: list[Slot], path: Path, advance: Advance) -> str:
    """Write the data file `path` with these slots, in parts of at most `BLOCK_BYTES` bytes where possible.

    advance: called with the number of bytes of each part.
    Returns the SHA-256 of the file.
    """
    digest = hashlib.sha256()
    with path.open("wb") as stream:
        for slot in slots:
            gap = memoryview(bytes(slot.offset - stream.tell()))
            for part in chain([gap], byte_blocks(slot.tensor)):
                stream.write(part)
                digest.update(part)
                advance(len(part))
            if stream.tell() != slot.offset + slot.length:
                raise ValueError(f"{slot.name} has {stream.tell() - slot.offset} bytes instead of {slot.length}")
    return digest.hexdigest()


def _file_names(name: str, count: int) -> list[str]:
    """`name` for one file; `model-00001-of-00002.onnx_data`, ... for several."""
    stem, _, suffix = name.partition(".")
    return [f"{stem}-{index + 1:05d}-of-{count:05d}.{suffix}" for index in range(count)] if count > 1 else [name]


def weight_bytes(model: ir.Model) -> int:
    """Return the bytes of all initializers together."""
    return sum(tensor.nbytes for tensor in initializer_tensors(model))


def parameter_count(model: ir.Model) -> int:
    """Return the approximate number of weights, from the bytes of each element type."""
    sizes = bytes_by_type(model).items()
    return round(sum(size * 8 / ELEMENT_TYPES[name].bits for name, size in sizes if name in ELEMENT_TYPES))


def bytes_by_type(model: ir.Model) -> dict[str, int]:
    """Return {element type (see quantised_type): bytes of initializers}, the largest first."""
    found: dict[str, int] = {}
    for value in initializers(model):
        name = quantised_type(value) or constant_of(value).dtype.name.lower()
        found[name] = found.get(name, 0) + int(constant_of(value).nbytes)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def quantised_type(value: ir.Value) -> str | None:
    """`int4` or `int8` for codes and zero points of a block-quantised weight (stored as uint8), else None."""
    for node, _ in value.uses():
        if node.op_type in _QUANTISED and value.const_value is not None:
            bits = int(number_attribute(node, _QUANTISED[node.op_type], 4))
            return f"int{bits}" if value.const_value.dtype in (ir.DataType.UINT8, *_CODE_TYPES) else None
    return None


def data_slots(model: ir.Model, max_shard_size: int | None = None) -> list[Slot]:
    """Lay out the weights that no data file holds yet. Returns no slots if they fit into model.onnx."""
    unwritten = [value for value in initializers(model) if not isinstance(value.const_value, ir.ExternalTensor)]
    inline_bytes = EXTERNAL_ABOVE if max_shard_size is None else min(EXTERNAL_ABOVE, max_shard_size)
    if sum(constant_of(value).nbytes for value in unwritten) <= inline_bytes:
        return []
    return lay_out(unwritten, external_files(model), max_shard_size)


def written_sizes(model: ir.Model, slots: list[Slot]) -> dict[str, int]:
    """Return {file name: bytes} of the files that `write_model` would write."""
    with _refer_to_files(slots, Path()):
        return {MODEL_NAME: ir.to_proto(model).ByteSize(), **{slot.file: slot.offset + slot.length for slot in slots}}


def write_model(
    model: ir.Model, folder: Path, advance: Advance = lambda _bytes: None, slots: list[Slot] | None = None
) -> dict[str, str]:
    """Write model.onnx and the data files of `slots` into `folder`. Returns {data file: SHA-256}.

    References to the decoder's own data files keep their relative locations.
    advance: called with the number of bytes of each part.
    slots: by default those of data_slots.
    Raises ExportError for a graph that protobuf cannot hold.
    """
    slots = data_slots(model) if slots is None else slots
    try:
        files = dict.fromkeys(slot.file for slot in slots)
        hashes = {file: _write_data([s for s in slots if s.file == file], folder / file, advance) for file in files}
        with _refer_to_files(slots, folder):
            ir.save(model, folder / MODEL_NAME)
    except (MemoryError, ValueError) as error:
        raise ExportError(f"the graph cannot be written ({error}); report this model.") from error
    return hashes


def onnx_data_files(model: ir.Model, source: Source) -> dict[str, Path]:
    """The data files of an ONNX decoder: location in the graph -> path. {} for other sources."""
    if source.onnx is None:
        return {}
    return {location: source.onnx.parent / location for location in external_files(model)}


def copy_data_files(model: ir.Model, source: Source, folder: Path, advance: Advance, *, hard_link: bool) -> None:
    """Copy the data files of an ONNX decoder to `folder`.

    hard_link: make hard links where the file system can. That takes no time or space, but onnx and onnx_ir refuse
        hard-linked data files as an attack. onnxruntime accepts them, but not symbolic links.
    advance: called with the number of bytes written since its last call.
    """
    for location, path in onnx_data_files(model, source).items():
        real, target = path.resolve(strict=True), folder / location
        target.parent.mkdir(parents=True, exist_ok=True)
        if hard_link:
            try:
                os.link(real, target)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
            else:
                advance(real.stat().st_size)
                continue
        with real.open("rb") as read, target.open("wb") as write:
            while part := read.read(_COPY_PART):
                write.write(part)
                advance(len(part))


@contextlib.contextmanager
def _refer_to_files(slots: list[Slot], folder: Path) -> Iterator[None]:
    """Inside the block, the graph refers to the data files instead of holding the weights of `slots`."""
    before = [slot.tensor for slot in slots]
    for slot, tensor in zip(slots, before, strict=True):
        shape = ir.Shape([int(size) for size in tensor.shape])
        place = (slot.file, slot.offset, slot.length, tensor.dtype)
        slot.value.const_value = ir.ExternalTensor(*place, shape=shape, name=slot.name, base_dir=folder)
    try:
        yield
    finally:
        for slot, tensor in zip(slots, before, strict=True):
            slot.value.const_value = tensor


_MEAN, _INVERSE_STD, _TABLE = 14, 15, 17  # inputs of the sampler node
_LOOKUP = "GatherBlockQuantized"


def read_tables(folder: Path) -> tuple[EmbeddingTable | None, tuple[Lookup, ...]]:
    """Read `folder/model.onnx`.

    Returns (the sampler's embeddings, or None if they are not plain or block-quantised constants; lookups in uint8).
    """
    graph = ir.load(folder / MODEL_NAME).graph
    lookups = (_read_lookup(node) for node in graph if node.op_type == _LOOKUP)
    sampler = next((node for node in graph if node.op_type == OP_TYPE), None)
    table = None if sampler is None or len(sampler.inputs) <= _TABLE else _read_table(sampler, folder)
    return table, tuple(lookup for lookup in lookups if lookup is not None)


def _read_table(sampler: ir.Node, folder: Path) -> EmbeddingTable | None:
    form = sampler.attributes["table_form"].as_string() if "table_form" in sampler.attributes else ""
    values = [*sampler.inputs[_MEAN : _INVERSE_STD + 1], *sampler.inputs[_TABLE:]]
    mean, inverse_std, rows, *others = [None if value is None else _stored(value, folder) for value in values]
    if mean is None or inverse_std is None or rows is None:
        return None
    table = EmbeddingTable(rows=rows, mean=mean, inverse_std=inverse_std)
    if form.startswith("Gather("):
        return structs.replace(table, transposed=producer(sampler.inputs[_TABLE], "Transpose") is not None)
    if rows.dtype != "uint8" or "quantize_axis=1" not in form:
        return None
    settings = dict(pair.split("=") for pair in form.partition("(")[2].rstrip(")").split(","))
    return structs.replace(
        table,
        bits=8 if settings["bits"] == "8" else 4,
        block_size=int(settings["block_size"]),
        scales=others[0],
        zero_points=others[1] if len(others) > 1 else None,
    )


def _stored(value: ir.Value, folder: Path) -> StoredArray | None:
    """Find the place of a constant's bytes; None if it is none."""
    tensor = _constant(value)
    if tensor is None or tensor.dtype.name.lower() not in ("float", "float16", "bfloat16", "uint8"):
        return None
    shape = tuple(tensor.shape.numpy())
    if len(shape) > 2:  # a tied head's codes [V, blocks, bytes]
        shape = (shape[0], math.prod(shape[1:]))
    if isinstance(tensor, ir.ExternalTensor):
        return StoredArray(str(tensor.location), tensor.offset or 0, tensor.dtype.name.lower(), shape)
    offset = map_file(folder / MODEL_NAME).find(tensor.tobytes())
    return None if offset < 0 else StoredArray(MODEL_NAME, offset, tensor.dtype.name.lower(), shape)


def _constant(value: ir.Value) -> ir.TensorProtocol | None:
    """Return the constant behind a value, also behind Reshape and Transpose."""
    node = producer(value, "Reshape") or producer(value, "Transpose")
    return value.const_value if node is None or node.inputs[0] is None else _constant(node.inputs[0])


def _read_lookup(node: ir.Node) -> Lookup | None:
    table = None if node.inputs[0] is None else _constant(node.inputs[0])
    if table is None or table.dtype != ir.DataType.UINT8:
        return None
    return Lookup(
        block_size=int(number_attribute(node, "block_size", 128)),
        width=math.prod(table.shape.numpy()[1:]) * 8 // int(number_attribute(node, "bits", 4)),
        has_zero_points=len(node.inputs) > 3 and node.inputs[3] is not None,
    )


def decoder_manifest(
    decoder: Decoder, sampler: SamplerSpec, source: Source, options: ExportOptions, folder: Path, known: dict[str, str]
) -> DecoderManifest:
    """Build the manifest of a decoder with its sampler, with the status "provisional".

    known: {file name: SHA-256} of files hashed while they were written.
    Raises UnsupportedModelError for a model that no valid manifest can describe, such as one with too many layers.
    """
    shared = manifest_fields(decoder.model, source, source.route, sampler, options, folder, known)
    manifest = DecoderManifest(**shared, decoder=decoder.info, source_tensors=decoder.source_tensors)
    try:
        manifest_from_json(manifest.to_json())
    except ManifestError as error:
        raise UnsupportedModelError(
            f"the export of {source.id} would not load ({str(error).partition(';')[0]}); correct the model's "
            "configuration."
        ) from None
    return manifest


def report_of(
    model: ir.Model,
    out: Path,
    started: float,
    sizes: dict[str, int],
    verification: Verification | None = None,
    decoder: Decoder | None = None,
    memory: dict[str, int] | None = None,
) -> ExportReport:
    """Build the report of an export, or of a dry run without `verification`.

    started: when the export began, by time.monotonic().
    sizes: bytes by file.
    decoder: None for the sampler alone.
    memory: peak bytes by stage.
    """
    return ExportReport(
        output=out,
        dry_run=verification is None,
        model_type="sampler" if decoder is None else decoder.info.model_type,
        inputs=_tensor_specs(model.graph.inputs),
        outputs=_tensor_specs(model.graph.outputs),
        nodes=len(model.graph),
        weight_bytes=weight_bytes(model),
        file_bytes=sum(sizes.values()) or weight_bytes(model),
        files=() if verification is None else tuple(sorted(sizes)),
        seconds=time.monotonic() - started,
        verification=verification or Verification(status="skipped"),
        notices=() if decoder is None else tuple(decoder.notices),
        sizes=sizes,
        memory=memory or {},
        states={} if decoder is None else decoder.info.state_bytes(),
    )


def file_bytes_in(folder: Path) -> dict[str, int]:
    """Return {path relative to `folder`: bytes} of all files in it."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def manifest_fields(
    model: ir.Model,
    source: Source,
    route: str,
    spec: SamplerSpec,
    options: SamplerOptions,
    folder: Path,
    known: dict[str, str],
) -> dict[str, Any]:
    """The fields of every manifest, with the status "provisional". known: see `decoder_manifest`."""
    outputs = _tensor_specs(model.graph.outputs)
    table, lookups = read_tables(folder)
    types = {"types": source.types} if source.types else {}
    return {
        "source": {"id": source.id, "revision": source.revision, "route": route} | types,
        "libraries": library_versions(),
        "opset": {str(domain): int(version) for domain, version in model.opset_imports.items()},
        "inputs": _tensor_specs(model.graph.inputs),
        "outputs": outputs,
        "sampler": SamplerInfo(
            branches=spec.branches,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            table_form=spec.embedding.form if spec.embedding is not None else "",
            options=spec.options,
            outputs=tuple(output.name for output in outputs if not output.name.startswith("present.")),
            neighbour_bound=options.neighbour_bound,
            rules=spec.rules,
            table=table,
        ),
        "lookups": lookups,
        "defaults": options.defaults_for(spec.options.metric, spec.hidden_size),
        "default_beta": options.default_beta,
        "verification": Verification(status="provisional"),
        "files": describe_files(folder, list(file_bytes_in(folder)), known),
    }


def _tensor_specs(values: Iterable[Any]) -> tuple[TensorSpec, ...]:
    specs = []
    for value in values:
        shape = tuple(d if isinstance(d, int) else str(d) for d in value.shape)
        specs.append(TensorSpec(value.name, value.dtype.name.lower(), shape))
    return tuple(specs)
