"""Tool calls: Python functions as tools, and the calls in a model's output.

calls: results. parser: parses an output while it arrives. families: which formats are known.
family: what a family states. hermes, llama, mistral, gemma, pythonic, harmony, deepseek: one format each.
cursor, values, function_tags: reading text that is still arriving.
schema: the caller's tools. messages: calls as templates take them. required, literals: grammars of calls.
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
