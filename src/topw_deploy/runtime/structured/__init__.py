"""Structured output: answers that match a JSON schema, a regular expression, a list of choices or a grammar.

constraint: what a request states.
lark: a constraint as a grammar for llguidance.
grammars: compiles grammars for one model's vocabulary.
guide: which tokens may follow, one sequence at a time.
"""
