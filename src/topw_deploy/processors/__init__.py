"""Top-W and the other rules inside transformers' `generate`, without an export (docs/guide/transformers.md)."""

try:
    from topw_deploy.processors.distance import median_distance_of
    from topw_deploy.processors.processor import Choices, TopWLogitsProcessor
    from topw_deploy.processors.rules import RuleChoices, RuleLogitsProcessor
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers"):
        raise
    raise ModuleNotFoundError(
        f"topw_deploy.processors needs {error.name}; run: pip install torch transformers", name=error.name
    ) from error

__all__ = ["Choices", "RuleChoices", "RuleLogitsProcessor", "TopWLogitsProcessor", "median_distance_of"]
