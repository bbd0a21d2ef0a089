"""`topw compare`: compare the texts of one model under several sampling rules and temperatures, with the same seeds.

- `comparison`: generates the texts, and computes the metrics of each rule at each temperature, with intervals
- `page`: the same with plots and all texts as an HTML page
"""
