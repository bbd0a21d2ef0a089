"""`topw compare`: compare the texts of one model under several sampling rules and temperatures, with the same seeds.

- `collect`: generates the texts
- `report`: the metrics of each rule at each temperature with intervals, as a table and as JSON
- `page`: the same with plots and all texts as an HTML page
"""
