"""onnxruntime's native operator agrees with the model's function.

Against the reference: tests/export/sampler/test_function.py. Edits, masks and rules: test_ort_node.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.function_cases import Wanted, clear_rows, feeds, open_model, run
from tests.support.rows import random_case
from topw_deploy.sampling import sample_row
from topw_deploy.sampling.parameters import METRICS, PARAMETER_NAMES, TopWOptions


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("branches", [True, False])
@pytest.mark.parametrize(("mass", "keep_mask"), [(False, False), (True, False), (False, True), (True, True)])
def test_every_set_of_outputs_is_recognised_and_equals_the_functions(
    native_library: Path, metric: Any, branches: bool, mass: bool, keep_mask: bool
) -> None:
    wanted = Wanted(TopWOptions(top_m=40, metric=metric), branches=branches, mass=mass, keep_mask=keep_mask)
    model = wanted.model()
    rng = np.random.default_rng(1)
    inputs = feeds([random_case(rng, wanted.vocab_size) for _ in range(24)])
    function, native = run(open_model(model), inputs), run(open_model(model, native_library), inputs)
    assert list(native) == list(function)
    assert ("mass" in native, "keep_mask" in native) == (mass, keep_mask)
    same = clear_rows(wanted, inputs)
    assert same.sum() > 12
    for name, values in native.items():
        assert values.dtype == function[name].dtype, name
        assert values.shape == function[name].shape, name
        if name in ("logprob", "mass"):
            np.testing.assert_allclose(values[same], function[name][same], rtol=5e-4, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(values[same], function[name][same], err_msg=name)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_tables_of_half_precision_are_read_as_they_are(native_library: Path, dtype: Any) -> None:
    wanted = Wanted(dtype=dtype, hidden_size=19, keep_mask=True)
    rng = np.random.default_rng(2)
    inputs = feeds([random_case(rng, wanted.vocab_size) for _ in range(60)])
    found = run(open_model(wanted.model(), native_library), inputs)
    for index in np.flatnonzero(clear_rows(wanted, inputs)):
        parameters = {n: float(inputs[n][index]) for n in PARAMETER_NAMES}
        row = sample_row(
            inputs["logits"][index], parameters, wanted.options, wanted.geometry, float(inputs["uniform"][index])
        )
        np.testing.assert_array_equal(np.flatnonzero(found["keep_mask"][index]), np.sort(row.kept_ids))
