"""Structured output: answers that match a JSON schema, a regular expression, a list of choices or a grammar.

constraint: a request's constraint, from its parameters.
lark: the constraint as a grammar for llguidance.
schema_limits: limits of JSON schemas.
grammars: compiles grammars for one model's vocabulary.
deep_stack: a large stack for the compiler.
guide: which tokens a sequence may continue with.
compiler_errors: llguidance's messages as GrammarErrors.
"""
