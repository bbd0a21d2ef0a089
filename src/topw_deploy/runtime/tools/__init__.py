"""Tool calls: Python functions as tools, and the calls in a model's output.

formats: the table of families and formats, and detection of a template's family.
literals: reads values that are still arriving.
parser: parses an output while it arrives.
grammar: grammars that allow only calls.
schema: checks the caller's tools, and makes schemas of Python functions.
"""

from topw_deploy.runtime.tools.formats import FAMILIES, detect
from topw_deploy.runtime.tools.grammar import required_calls
from topw_deploy.runtime.tools.parser import Content, Parsed, Reasoning, ToolCall, ToolCallParser, parse
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
