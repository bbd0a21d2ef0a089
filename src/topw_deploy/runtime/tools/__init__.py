"""Tool calls: Python functions as tools, and the calls in a model's output.

calls: a parser's results.
parser: parses an output while it arrives.
families: the known formats, and detection of a template's format.
family: what defines a format.
hermes, llama, mistral, gemma, pythonic, harmony, deepseek: one format each.
cursor, values, function_tags: read text that is still arriving.
schema: checks the caller's tools, and makes schemas of Python functions.
messages: puts calls into the form that a template takes.
required, literals: grammars that allow only calls.
"""

from topw_deploy.runtime.tools.calls import Content, Parsed, Reasoning, ToolCall
from topw_deploy.runtime.tools.families import FAMILIES, detect
from topw_deploy.runtime.tools.parser import ToolCallParser, parse
from topw_deploy.runtime.tools.required import required_calls
from topw_deploy.runtime.tools.schema import function_schema

__all__ = [
    "FAMILIES",
    "Content",
    "Parsed",
    "Reasoning",
    "ToolCall",
    "ToolCallParser",
    "detect",
    "function_schema",
    "parse",
    "required_calls",
]
