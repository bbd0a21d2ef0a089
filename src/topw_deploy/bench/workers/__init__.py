"""Sides that run in processes of their own. Each file but this one and `serve` is loaded by `serve.py`, perhaps in an
environment that has no topw_deploy: it may import what that environment has, and nothing of this package."""
