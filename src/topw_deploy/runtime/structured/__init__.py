"""Structured output: answers that match a JSON schema, a regular expression, a list of choices or a grammar.

constraint: reads a request's constraint from its parameters.
lark: writes a constraint as a grammar for llguidance.
grammars: compiles grammars for one model's vocabulary.
guide: tracks which tokens a sequence's grammar allows next.
compiler_errors: turns llguidance's messages into GrammarErrors.
"""
