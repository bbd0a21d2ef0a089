"""The exported graph with products computed in float32, for a moment beside the export.

MatMulNBits at accuracy level 4 rounds activations to 8 bits, which is speed bought with accuracy and no error of the
export. Without that the graph must agree with its weights, dequantised, to float32's rounding.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from topw_deploy.errors import VerificationError
from topw_deploy.export.write.weights import MODEL_FILE
from topw_deploy.manifest import DecoderManifest, describe_files, save_manifest

_FLOAT32 = 1  # accuracy_level


@contextlib.contextmanager
def exact_products(folder: Path, manifest: DecoderManifest) -> Iterator[Path]:
    """A folder like `folder` whose MatMulNBits nodes compute in float32; `folder` itself where they do already.

    Its data files are second names of the export's, or copies where there can be none.
    Raises VerificationError if it cannot be made beside `folder`.
    """
    if manifest.decoder.quantisation.get("accuracy_level", 0) in (0, _FLOAT32):
        yield folder
        return
    try:
        made = Path(tempfile.mkdtemp(prefix=".topw-exact-", dir=folder.parent))
    except OSError as error:
        raise VerificationError(
            f"{folder.parent} cannot be written ({error.strerror}), but a variant of the graph must lie there for a "
            "moment; copy the folder and verify the copy."
        ) from error
    try:
        for name in manifest.files.keys() - {MODEL_FILE}:
            (made / name).parent.mkdir(exist_ok=True, parents=True)
            _bring(folder / name, made / name)
        _write_exact(folder / MODEL_FILE, made / MODEL_FILE)
        files = manifest.files | describe_files(made, [MODEL_FILE])
        save_manifest(made, replace(manifest, files=files))
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write_exact(source: Path, target: Path) -> None:
    model = ir.load(source)
    for node in model.graph:
        if node.op_type == "MatMulNBits" and "accuracy_level" in node.attributes:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", _FLOAT32)
    ir.save(model, target)


def _bring(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
