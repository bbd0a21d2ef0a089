"""Jinja's immutable sandbox, with operators, calls and output counted on the current meter."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace, pass_context

from topw_deploy.runtime.template import methods
from topw_deploy.runtime.template.filters import (
    BoundedEscapeFormatter,
    BoundedFormatter,
    bounded_filters,
    bounded_tests,
    format_percent,
)
from topw_deploy.runtime.template.meter import MAX_INTEGER_BITS, Meter, current_meter
from topw_deploy.runtime.template.rewrite import COUNTING, rewrite

MAX_SOURCE_CHARACTERS = 2**18
"""Maximum characters of a template. Published templates have up to about 30,000."""
_MAX_DATE_FORMAT = 1000
_CALL_STEPS, _OPERATOR_STEPS, _OUTPUT_STEPS = 8, 4, 2  # about proportional to the time they take


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates that count their work on the current meter."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_finalize,
            extensions=[jinja2.ext.loopcontrols, _Generation],
        )
        self.filters.clear()
        self.filters.update(bounded_filters(), **COUNTING)
        self.tests.update(bounded_tests())
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile_template(self, source: str) -> jinja2.Template:
        """Raises TemplateError, or an error of Python's compiler."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise jinja2.TemplateSyntaxError(
                f"it has {len(source):,} characters, more than {MAX_SOURCE_CHARACTERS:,}", 1
            )
        return self.from_string(rewrite(self.parse(source)))

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]  # called by compiled templates
        return current_meter().join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = current_meter()
        meter.count_steps(_OPERATOR_STEPS)
        if operator == "%" and isinstance(left, str):
            return format_percent(meter, left, right)
        if isinstance(left, int) and isinstance(right, int):
            _check_integers(meter, operator, left, right)
        elif operator == "*":
            times, value = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and not isinstance(value, float):
                meter.check_size(_size(meter, value) * max(times, 0))
        elif operator == "+" and not isinstance(left, float):
            meter.check_size(_size(meter, left) + _size(meter, right))
        return meter.count_new(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            current_meter().count_read(argument)  # Python hashes it
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        form, as_map = value.__self__, value.__name__ == "format_map"
        plain = type(form) is str
        formatter = BoundedFormatter(self) if plain else BoundedEscapeFormatter(self, escape=form.escape)

        def formatted(*args: Any, **kwargs: Any) -> str:
            if as_map:
                (kwargs,), args = args, ()
            text: str = type(form)(formatter.vformat(form, args, kwargs))
            return text

        return formatted

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # noqa: N805
        meter = current_meter()
        meter.count_steps(_CALL_STEPS + len(args) + len(kwargs))
        if isinstance(__obj, types.BuiltinMethodType) and not isinstance(__obj.__self__, types.ModuleType):
            own = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            return methods.call_method(meter, __obj, args, own)
        if isinstance(__obj, type) and __obj not in (dict, _Namespace, Cycler, Joiner):
            raise SecurityError(f"a template may not create a {__obj.__name__}")
        if __obj is dict:
            meter.count_read(*args, *kwargs.values())
        elif isinstance(getattr(__obj, "__self__", None), LoopContext):
            meter.count_read(*args)  # `loop.changed` compares them
        result = super().call(__context, __obj, *args, **kwargs)
        return meter.count_new(result) if __obj is dict else result


@pass_context  # so that Jinja does not call it while compiling
def _finalize(context: Context, value: Any) -> Any:
    meter = current_meter()
    meter.count_steps(_OUTPUT_STEPS)
    return meter.to_text(value)


def _size(meter: Meter, value: Any) -> int:
    return len(value) if isinstance(value, str) else meter.measure(value)[0]


def _check_integers(meter: Meter, operator: str, left: int, right: int) -> None:
    bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
    if bits > MAX_INTEGER_BITS and not (operator == "**" and abs(left) <= 1):
        meter.refuse(f"computes with integers of more than {MAX_INTEGER_BITS:,} bits")


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks text for training. It has no effect here."""

    tags = {"generation"}  # noqa: RUF012  # Jinja declares a plain set

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """Jinja's `namespace`, but attributes may not begin with an underscore, as Python's own do."""

    def __init__(
        *arguments: Any, **attributes: Any
    ) -> None:  # no parameter `self`, because an attribute may have this name
        self, *rest = arguments
        values = dict(*rest, **attributes)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # Jinja's prints all attributes, without a bound
        return "<Namespace>"


def _check_attribute(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace may not have the attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_DATE_FORMAT:
        raise SecurityError(f"strftime_now takes at most {_MAX_DATE_FORMAT} characters")
    return datetime.now().strftime(form)
