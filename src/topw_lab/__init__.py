"""The laboratory of topw_deploy: measure samplers and loops, show what rules did to a text, and compare their texts.

- `bench`: `topw bench`
- `stats`: `topw stats`
- `compare`: `topw compare`
- `harness`: `topw lm-eval`, and the model class of lm-evaluation-harness
- `judges`: the file formats of AlpacaEval and MT-Bench, for `topw generate --format`
- `worker`, `running`, `tables`, `plots`: what they share
"""
