"""What an export says of itself: its manifest and its report."""

from __future__ import annotations

import time
from pathlib import Path

from topw_deploy.errors import ManifestError, UnsupportedModelError
from topw_deploy.export.build import Built
from topw_deploy.export.request import ExportReport, ExportRequest
from topw_deploy.export.source.resolve import Source
from topw_deploy.export.write.libraries import library_versions
from topw_deploy.export.write.weights import weight_bytes
from topw_deploy.manifest import (
    DecoderManifest,
    SamplerInfo,
    TensorSpec,
    Verification,
    describe_files,
    manifest_from_json,
)


def manifest_of(
    built: Built, request: ExportRequest, source: Source, folder: Path, known: dict[str, str] | None = None
) -> DecoderManifest:
    """The manifest of what lies in `folder`, its verification still to come. known: SHA-256 by name, of files whose
    hash was taken as they were written.

    Raises UnsupportedModelError for a model that no manifest can state, as with more layers than are read.
    """
    decoder, spec = built.decoder, built.spec
    graph = decoder.model.graph
    inputs, outputs = tensor_specs(graph.inputs), tensor_specs(graph.outputs)
    manifest = DecoderManifest(
        source={"id": source.id, "revision": source.revision, "route": source.route},
        libraries=library_versions(),
        opset={str(domain): int(version) for domain, version in decoder.model.opset_imports.items()},
        inputs=inputs,
        outputs=outputs,
        sampler=SamplerInfo(
            tail=spec.form,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            table_form=spec.embedding.form if spec.embedding else "",
            options=spec.options,
            outputs=tuple(o.name for o in outputs if not o.name.startswith("present.")),
            neighbour_bound=request.neighbour_bound,
        ),
        defaults=request.defaults,
        decoder=decoder.info,
        verification=Verification(status="provisional"),
        files=describe_files(folder, [str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()], known),
    )
    try:
        manifest_from_json(manifest.to_json())
    except ManifestError as error:
        raise UnsupportedModelError(
            f"the export of {source.id} would not load ({str(error).partition(';')[0]}); correct the model's "
            "configuration."
        ) from None
    return manifest


def report_of(
    built: Built,
    request: ExportRequest,
    started: float,
    sizes: dict[str, int],
    memory: dict[str, int],
    verification: Verification | None = None,
) -> ExportReport:
    """The report on what was written, or would be. sizes: file -> bytes. memory: stage -> bytes."""
    graph = built.decoder.model.graph
    return ExportReport(
        output=Path(request.output),
        dry_run=request.dry_run,
        model_type=built.decoder.info.model_type,
        inputs=tensor_specs(graph.inputs),
        outputs=tensor_specs(graph.outputs),
        nodes=len(graph),
        weight_bytes=weight_bytes(built.decoder.model),
        file_bytes=sum(sizes.values()),
        files=() if request.dry_run else tuple(sorted(sizes)),
        seconds=time.monotonic() - started,
        verification=verification or Verification(status="skipped"),
        notices=tuple(built.notices),
        sizes=sizes,
        memory=memory,
    )


def sizes_in(folder: Path) -> dict[str, int]:
    """Name -> bytes of every file in `folder`."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def tensor_specs(values: object) -> tuple[TensorSpec, ...]:
    """Graph inputs or outputs as the manifest lists them."""
    specs = []
    for value in values:  # type: ignore[attr-defined]
        shape = tuple(d if isinstance(d, int) else str(d) for d in value.shape)
        specs.append(TensorSpec(value.name, value.dtype.name.lower(), shape))
    return tuple(specs)
