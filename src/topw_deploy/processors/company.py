"""What else `generate` does to the scores: refuse what would silently make the result something other than Top-W.

`generate` tells a processor nothing about its settings, and puts its own warpers behind it: temperature, top-k (50
unless told otherwise) and the like. But they all stand in one `LogitsProcessorList`, whose `__call__` is what calls a
processor; so that is where they are looked up. A processor called by anything else is not checked.
"""

from __future__ import annotations

import sys
from types import FrameType

from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper

from topw_deploy.errors import ParameterError

# Warpers that cut the crop again: generate's name for them, the attribute that holds their value, and the value with
# which they cut nothing. By name, as not every version of transformers has all of them.
_CUTTING = {
    "TopKLogitsWarper": ("top_k", "top_k", 0),
    "TopPLogitsWarper": ("top_p", "top_p", 1.0),
    "MinPLogitsWarper": ("min_p", "min_p", 0.0),
    "TopHLogitsWarper": ("top_h", "top_h", None),
    "TypicalLogitsWarper": ("typical_p", "mass", 1.0),
    "EpsilonLogitsWarper": ("epsilon_cutoff", "epsilon", 0.0),
    "EtaLogitsWarper": ("eta_cutoff", "epsilon", 0.0),
}


_CALLS_BETWEEN = 4  # a subclass may call its parent


def check_company(processor: LogitsProcessor, temperature: float | None, frame: FrameType | None) -> None:
    """Look at the list that calls `processor` and at what calls the list.

    temperature: what the draw must be made at, or None for any. frame: of the caller of `processor.__call__`.
    Raises ParameterError for beam search, for a warper behind the processor that removes tokens, and for another
    temperature.
    """
    company = None
    for _ in range(_CALLS_BETWEEN):
        if frame is None or frame.f_code.co_name != "__call__":
            return
        company = frame.f_locals.get("self")
        if isinstance(company, LogitsProcessorList):
            break
        frame = frame.f_back
    if frame is None or not isinstance(company, LogitsProcessorList):
        return
    if frame.f_back is not None and frame.f_back.f_code.co_name == "_beam_search":
        raise ParameterError(
            "generate runs a beam search, which needs more tokens a step than Top-W may keep; pass num_beams=1."
        )
    place = next((i for i, other in enumerate(company) if other is processor), len(company))
    drawn_at = 1.0
    for warper in company[place + 1 :]:
        _refuse_cutting(warper)
        if isinstance(warper, TemperatureLogitsWarper):
            drawn_at *= warper.temperature
    if temperature is not None and drawn_at != temperature:
        raise ParameterError(
            f"generate draws at temperature {drawn_at}, but the processor was told {temperature}; give both the same "
            f"(with do_sample=True), or give the processor selection_temperature alone."
        )


def _refuse_cutting(warper: LogitsProcessor) -> None:
    name, attribute, neutral = _CUTTING.get(type(warper).__name__, (None, "", None))
    if name is None:
        return
    value = getattr(warper, attribute, None)
    if neutral is not None and value == neutral:
        return
    default = " (its default)" if (name, value) == ("top_k", 50) else ""
    raise ParameterError(
        f"generate applies {name}={value} behind Top-W{default}, which would cut the crop again; pass "
        f"{name}={neutral}, or **processor.generate_arguments()."
    )


def caller() -> FrameType | None:
    """The frame that called the function which calls this."""
    return sys._getframe(2) if hasattr(sys, "_getframe") else None
