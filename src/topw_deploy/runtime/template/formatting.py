"""Bounded text formatting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter

from topw_deploy.runtime.template.meter import Meter, current

_WIDE_FIELD = re.compile(r"[0-9]{4,}")
_WIDE_CONVERSION = re.compile(r"[%)][#0\- +]*(?:[1-9][0-9]{3,}|\*|[0-9]*\.(?:[0-9]{4,}|\*))")  # also after (name)
_WIDTH = 1000


def percent(meter: Meter, form: str, values: Any) -> str:
    """`form % values`. Raises SecurityError for widths above 999."""
    if _WIDE_CONVERSION.search(form):
        raise SecurityError(f"a format may not have a width of {_WIDTH} or more, or given by '*'")
    conversions = form.count("%")
    times = conversions if isinstance(values, Mapping) else 1  # mapping values can repeat
    meter.read(form, values)
    meter.expect(len(form) + conversions * _WIDTH + (meter.printed(values) * times if conversions else 0))
    text: str = meter.make(form % values)
    return text


class BoundedFormatter(SandboxedFormatter):
    """`str.format` for templates."""

    def format_field(self, value: Any, format_spec: str) -> str:
        meter = current()
        if _WIDE_FIELD.search(format_spec):
            raise SecurityError(f"a format may not have a width of {_WIDTH} or more")
        meter.expect(meter.printed(value))
        text: str = super().format_field(value, format_spec)
        meter.use(len(text))
        return text

    def convert_field(self, value: Any, conversion: Any) -> Any:
        meter = current()
        meter.expect(meter.printed(value))
        return super().convert_field(value, conversion)


class BoundedEscapeFormatter(BoundedFormatter, SandboxedEscapeFormatter):
    """`Markup.format` for templates."""
