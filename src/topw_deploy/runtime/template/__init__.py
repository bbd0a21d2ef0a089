"""Jinja with bounds: chat templates are untrusted code that must terminate and fit into memory.

`rewrite` counts loops, comparisons and new values; `environment` operators and calls; `filters` and `methods` those of
Jinja and text. `meter` holds the counts.
"""
