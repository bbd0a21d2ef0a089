"""Jinja with bounds: a model's chat template is untrusted code that must end and fit into memory.

`rewrite` adds counting of loops, comparisons and new values to a template, `environment` counts operators and calls,
`filters` and `methods` those of Jinja and text; `meter` holds the counts.
"""
