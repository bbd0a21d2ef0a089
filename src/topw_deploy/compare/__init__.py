"""`topw compare`: one model, several sampling rules and temperatures, the same seeds.

collect: generates. metrics: numbers of a few texts. summary: numbers of a rule at a temperature, with intervals.
table, page: the report as text and as HTML.
"""
