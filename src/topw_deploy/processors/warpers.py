"""Refuse warpers of `generate` that would change a processor's result.

`generate` appends its own warpers (by default top-k 50) to the `LogitsProcessorList` that calls the processor. The call
does not pass that list, so it is read from the calling frame. If anything else calls a processor, nothing is checked.
"""

from __future__ import annotations

import sys
from types import FrameType

from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper

from topw_deploy.errors import ParameterError

# Warpers that remove tokens: class name -> (generate's argument, attribute, value that removes nothing). They are
# recognised by name, because some transformers versions lack some of them.
_CUTTING_WARPERS = {
    "TopKLogitsWarper": ("top_k", "top_k", 0),
    "TopPLogitsWarper": ("top_p", "top_p", 1.0),
    "MinPLogitsWarper": ("min_p", "min_p", 0.0),
    "TopHLogitsWarper": ("top_h", "top_h", None),
    "TypicalLogitsWarper": ("typical_p", "mass", 1.0),
    "EpsilonLogitsWarper": ("epsilon_cutoff", "epsilon", 0.0),
    "EtaLogitsWarper": ("eta_cutoff", "epsilon", 0.0),
}


_MOST_CALLS_BETWEEN = 4  # frames to search, because a subclass may call its parent's __call__


def check_warpers(processor: LogitsProcessor, temperature: float | None, frame: FrameType | None, label: str) -> None:
    """Check the warpers in the list that calls `processor`, and the caller of that list.

    temperature: the temperature that `generate` must draw at; None for any.
    frame: the frame that calls `processor.__call__`.
    label: the processor's rule, for messages.

    Raises ParameterError for beam search, for a later warper that removes tokens, and for another temperature.
    """
    warpers = None
    for _ in range(_MOST_CALLS_BETWEEN):
        if frame is None or frame.f_code.co_name != "__call__":
            return
        warpers = frame.f_locals.get("self")
        if isinstance(warpers, LogitsProcessorList):
            break
        frame = frame.f_back
    if frame is None or not isinstance(warpers, LogitsProcessorList):
        return
    if frame.f_back is not None and frame.f_back.f_code.co_name == "_beam_search":
        raise ParameterError(
            f"generate runs a beam search, which needs more tokens a step than {label} may keep; pass num_beams=1."
        )
    place = next((i for i, other in enumerate(warpers) if other is processor), len(warpers))
    drawn_at = 1.0
    for warper in warpers[place + 1 :]:
        _refuse_cutting(warper, label)
        if isinstance(warper, TemperatureLogitsWarper):
            drawn_at *= warper.temperature
    if temperature is not None and drawn_at != temperature:
        raise ParameterError(
            f"generate draws at temperature {drawn_at}, but the processor has {temperature}; give both the same "
            f"(with do_sample=True), or give the processor only selection_temperature."
        )


def _refuse_cutting(warper: LogitsProcessor, label: str) -> None:
    name, attribute, neutral = _CUTTING_WARPERS.get(type(warper).__name__, (None, "", None))
    if name is None:
        return
    value = getattr(warper, attribute, None)
    if neutral is not None and value == neutral:
        return
    default = " (its default)" if (name, value) == ("top_k", 50) else ""
    raise ParameterError(
        f"generate applies {name}={value} after {label}{default}, which would cut the crop again; pass "
        f"{name}={neutral}, or **processor.generate_arguments()."
    )


def frame_of_caller() -> FrameType | None:
    """The frame of the caller of the function that calls this one; None if Python has no frames."""
    return sys._getframe(2) if hasattr(sys, "_getframe") else None
