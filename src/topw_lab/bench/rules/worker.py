"""The worker of `topw bench rules`: opens a model once, and runs all rules and temperatures in the same session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from topw_deploy.errors import BenchmarkError
from topw_deploy.runtime import TopWModel


class RulesSettings(TypedDict):
    """Settings of the worker.

    folder: the exported model.
    sampler: "native" or "graph".
    threads: number of threads of the session.
    prompt: token ids.
    new_tokens: number of tokens to generate.
    """

    folder: str
    sampler: str
    threads: int
    prompt: list[int]
    new_tokens: int


def start(settings: RulesSettings) -> dict[str, Callable[..., Any]]:
    """Open the model. Returns the function `run`."""
    model = TopWModel.from_pretrained(
        settings["folder"], provider="cpu", sampler=settings["sampler"], intra_op_num_threads=settings["threads"]
    )

    def run(parameters: dict[str, Any], seed: int) -> dict[str, float]:
        """Generate once.

        parameters: the rule's parameters and the temperature.

        Returns seconds per token after the first one ("seconds"), the share of certified tokens ("certified"), and the
        mean size of the crops ("kept").
        """
        new_tokens = settings["new_tokens"]
        result = model.generate(settings["prompt"], max_new_tokens=new_tokens, seed=seed, ignore_eos=True, **parameters)
        drawn = len(result.token_ids)
        if drawn < new_tokens:  # a rule with fewer tokens would attend to a shorter context
            raise BenchmarkError(
                f"{settings['folder']} ended after {drawn} of {new_tokens} tokens ({result.finish_reason}); remove the "
                "stopping parameters from its generation_config.json."
            )
        return {
            "seconds": result.timings.seconds_per_token,
            "certified": result.certified_share,
            "kept": sum(result.kept) / drawn,
        }

    return {"run": run}
