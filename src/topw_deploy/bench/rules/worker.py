"""The worker: opens a model once and runs every rule and temperature in the same session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from topw_deploy.errors import BenchmarkError
from topw_deploy.runtime import TopWModel


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: folder, sampler ("native" or "graph"), threads, prompt (token ids), new_tokens."""
    model = TopWModel.from_pretrained(
        settings["folder"], provider="cpu", sampler=settings["sampler"], intra_op_num_threads=settings["threads"]
    )

    def run(parameters: dict[str, Any], seed: int) -> dict[str, float]:
        """Generate once. parameters: the rule's, and the temperature.

        Returns seconds per token after the first, the share of certified tokens, and the mean size of their crops.
        """
        wanted = settings["new_tokens"]
        result = model.generate(settings["prompt"], max_new_tokens=wanted, seed=seed, ignore_eos=True, **parameters)
        drawn = len(result.token_ids)
        if drawn < wanted:  # a rule with fewer tokens would attend to a shorter context
            raise BenchmarkError(
                f"{settings['folder']} ended after {drawn} of {wanted} tokens ({result.finish_reason}); remove the "
                "stopping parameters from its generation_config.json."
            )
        return {
            "seconds": result.timings.seconds_per_token,
            "certified": result.certified_share,
            "kept": sum(result.kept) / drawn,
        }

    return {"run": run}
