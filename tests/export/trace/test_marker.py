"""Models that no markers can represent are refused by name."""

from __future__ import annotations

import pytest

from benchmarks.coverage.tiny_models import tiny_model
from topw_deploy.errors import UnsupportedModelError
from topw_deploy.export.trace.trace import trace


@pytest.mark.slow
def test_patches_of_bytes_are_refused_with_their_reason() -> None:
    with pytest.raises(UnsupportedModelError, match="BltForCausalLM runs its middle layers once for each patch"):
        trace(tiny_model("blt"))
