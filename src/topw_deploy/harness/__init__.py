"""A model class for lm-evaluation-harness, registered as `topw_deploy` (docs/guide/evaluation.md).

model: the class. arguments: `--model_args`. asked: a request's parameters and seed. running: requests over the engine.
command: the harness's own command line with the class registered.

Importing this package registers the class: `lm_eval.simple_evaluate(model="topw_deploy", ...)` then finds it.
"""

from topw_deploy import install

install.require("evaluating", "lm-eval")

import lm_eval.models  # noqa: E402, F401  # the harness registers its own models only into an empty registry
from lm_eval.api.registry import model_registry  # noqa: E402

NAME = "topw_deploy"

if NAME not in model_registry:
    model_registry.register(NAME, target="topw_deploy.harness.model:TopWHarness")
