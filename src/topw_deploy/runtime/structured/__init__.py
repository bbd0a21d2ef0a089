"""Structured output: answers that match a JSON schema, a regular expression, a list of choices or a grammar.

constraint: a request's constraint, from its parameters.
lark: the constraint as a grammar for llguidance.
grammars: compiles grammars for one model's vocabulary.
guide: which tokens a sequence may continue with.
compiler_errors: llguidance's messages as GrammarErrors.
"""
