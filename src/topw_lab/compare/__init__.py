"""`topw compare`: compare the texts of one model under several sampling rules and temperatures, with the same seeds.

collect: generates the texts.
summary: computes the metrics of each rule at each temperature, with intervals.
table, page: write the report as text and as HTML.
"""
