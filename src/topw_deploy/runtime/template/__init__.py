"""Jinja with bounds: chat templates are untrusted code that must terminate and fit into memory.

meter: counts a template's work and enforces the bounds.
rewrite, environment, filters, methods: make Jinja report its work to the meter.
"""
