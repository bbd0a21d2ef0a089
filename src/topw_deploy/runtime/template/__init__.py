"""Jinja with bounds: a model's chat template is somebody else's program, which must end and fit into memory.

`rewrite` changes the parsed template so that every loop, comparison and new value is counted; `environment` counts
operators and calls, `filters` and `methods` Jinja's filters and the methods of text; `meter` holds the counts.
"""
