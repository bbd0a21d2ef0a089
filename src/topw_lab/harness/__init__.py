"""A model class for lm-evaluation-harness, registered as `topw_deploy` (docs/guide/evaluation.md).

- model: the class.
- arguments: checks `--model_args`.
- requests: parameters and seed of a request.
- running: runs requests through the engine.
- scoring: log-likelihoods of continuations.
- command: runs the harness's own command line, with the class registered.

Importing this package registers the class, so that `lm_eval.simple_evaluate(model="topw_deploy", ...)` finds it.
"""

from topw_deploy import install

install.require("evaluating", "lm-eval")

import lm_eval.models  # noqa: E402, F401  # the harness registers its own models only into an empty registry
from lm_eval.api.registry import model_registry  # noqa: E402

NAME = "topw_deploy"

if NAME not in model_registry:
    model_registry.register(NAME, target="topw_lab.harness.model:TopWHarness")
