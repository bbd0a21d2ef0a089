"""Jinja with bounds: chat templates are untrusted code that must terminate and fit into memory.

`rewrite` counts loops, comparisons and new values; `environment` operators and calls; `filters` and `methods` their own
work. `meter` holds the counts.
"""
