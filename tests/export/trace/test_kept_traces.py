"""Traces that a test run keeps (tests/support/traces.py) are those of their models."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from tests.support import traces
from tests.support.tiny_models import make_model


@pytest.mark.long
def test_a_kept_trace_equals_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "folder", tmp_path)
    model = make_model("gemma3")
    new = traces.trace(model)
    (file,) = tmp_path.iterdir()
    assert file.stem == traces.structure_of(model)
    monkeypatch.setattr(traces, "trace_anew", None)
    kept = traces.trace(make_model("gemma3"))
    found, wanted = (ir.to_proto(each.model).SerializeToString(deterministic=True) for each in (kept, new))
    assert found == wanted


def test_a_digest_depends_on_all_but_the_weights() -> None:
    digest = traces.structure_of(make_model("llama_tied"))
    other = make_model("llama_tied")
    with torch.no_grad():
        other.model.norm.weight.fill_(3.0)
    assert traces.structure_of(other) == digest
    other.model.rotary_emb.inv_freq.mul_(2)
    found = [digest, traces.structure_of(other), traces.structure_of(make_model("llama_tied").half())]
    for name, value in (("rms_norm_eps", 0.5), ("hidden_act", "gelu")):
        other = make_model("llama_tied")
        setattr(other.config, name, value)
        found.append(traces.structure_of(other))
    other = make_model("llama_tied")
    other.lm_head.weight = torch.nn.Parameter(other.lm_head.weight.detach().clone())
    found.append(traces.structure_of(other))
    assert len(set(found)) == len(found) == 6
    other.forward = other.forward
    assert traces.structure_of(other) is None
