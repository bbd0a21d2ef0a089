"""Rewrite a parsed template so that it counts its work.

Jinja compiles loops, comparisons, literals, slices and `~` to plain Python, which an environment cannot intercept.
`rewrite` wraps them in filters. The filters' names begin with a space, so that templates cannot use them.
"""

# ruff: noqa: N802, N815  # the names by which Jinja calls a visitor
from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateAssertionError
from jinja2.visitor import NodeTransformer

from topw_deploy.runtime.template.meter import current_meter

_BOUNDED_BY_EITHER = frozenset(
    {"eq", "ne", "gt", "gteq", "lt", "lteq"}
)  # these comparisons read only as much as the shorter operand has


def rewrite(template: nodes.Template) -> nodes.Template:
    """Modify `template` in place, and return it. Raises TemplateAssertionError for nodes that cannot be counted."""
    _Rewriter().visit(template)
    return template


def _count_steps(cost: Any) -> bool:
    if isinstance(cost, int):
        current_meter().count_steps(cost)
    return True


def _count_new(value: Any) -> Any:
    return current_meter().count_new(value)


def _count_read(value: Any) -> Any:
    current_meter().count_read(value)
    return value


def _join(values: list[Any]) -> str:
    meter = current_meter()
    return meter.join(map(meter.to_text, values))


COUNTING = {" step": _count_steps, " make": _count_new, " read": _count_read, " join": _join}


def _filter_node(name: str, node: nodes.Expr) -> nodes.Filter:
    """The expression `node` passed through a filter of COUNTING."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _node_count(parts: list[nodes.Node]) -> int:
    """The steps of running `parts` once: one per node, and one more."""
    return 1 + sum(1 + sum(1 for _ in part.find_all(nodes.Node)) for part in parts)


def _is_short(node: nodes.Expr) -> bool:
    """Whether a comparison with `node` reads at most 64 characters."""
    return isinstance(node, nodes.Const) and not (isinstance(node.value, str) and len(node.value) > 64)


class _Rewriter(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        cost = _node_count(list(node.body))
        if node.test is not None:
            counted = _filter_node(" step", nodes.Const(_node_count([node.test]), lineno=node.lineno))
            self.generic_visit(node)
            node.test = nodes.And(counted, node.test, lineno=node.lineno)
        else:
            self.generic_visit(node)
        return self._count_body(node, cost)

    def _visit_body(self, node: Any) -> nodes.Node:
        cost = _node_count(list(node.body))
        self.generic_visit(node)
        return self._count_body(node, cost)

    visit_Macro = visit_CallBlock = visit_Block = _visit_body

    def _count_body(self, node: Any, cost: int) -> nodes.Node:
        """Insert a count of `cost` steps at the beginning of the node's body."""
        step = _filter_node(" step", nodes.Const(cost, lineno=node.lineno))
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    def _visit_literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _filter_node(" make", node) if node.items and getattr(node, "ctx", "load") == "load" else node

    visit_List = visit_Tuple = visit_Dict = _visit_literal

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filter_node(" read", node.key)  # Python hashes it
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter_node(" join", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operators = {operand.op for operand in node.ops}
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if len(sides) == 2 and operators <= _BOUNDED_BY_EITHER and any(map(_is_short, sides)):
            return node
        node.expr = _filter_node(" read", node.expr)
        for operand in node.ops:
            operand.expr = _filter_node(" read", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter_node(" make", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:
        raise TemplateAssertionError("autoescape has no meaning in a prompt", node.lineno)
