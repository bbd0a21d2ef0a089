"""Jinja with bounds: chat templates are untrusted code that must terminate and fit into memory.

`rewrite`, `environment`, `filters` and `methods` count a template's work on a `meter`.
"""
