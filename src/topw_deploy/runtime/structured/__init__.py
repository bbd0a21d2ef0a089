"""Structured output: answers that match a JSON schema, a regular expression, a list of choices or a grammar.

constraint: reads a request's constraint from its parameters, and writes it as a grammar for llguidance.
guide: compiles grammars for one model's vocabulary, and tracks which tokens a sequence's grammar allows next.
"""
