"""The rules other than Top-W on torch tensors (docs/contract/rules.md)."""

from topw_deploy.sampling.torch.rules.crop import rule_rows

__all__ = ["rule_rows"]
