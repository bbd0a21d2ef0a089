"""The authors' logits processor, which this project does not contain: the user names its file."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from topw_deploy.errors import BenchmarkError


def load_processor(path: Path) -> Any:
    """The class in the user's file; it may print what it likes, the worker sends that away.

    Raises BenchmarkError for a file that does not hold it.
    """
    os.environ |= {"TOPW_PRINT_PARAMS": "0", "TOPW_PRINT_KEPT": "0"}
    spec = importlib.util.spec_from_file_location("authors_processor", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BenchmarkError(f"{path} is not a Python file; give the path of the authors' logit_processor_w1.py.")
    module: ModuleType = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise BenchmarkError(f"{path} does not load ({told}); give the authors' logit_processor_w1.py.") from error
    if not hasattr(module, "TopW_LogitsProcessor"):
        raise BenchmarkError(f"{path} has no TopW_LogitsProcessor; give the authors' logit_processor_w1.py.")
    return module.TopW_LogitsProcessor
