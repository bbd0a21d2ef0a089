"""The inputs and outputs of a generation's runs on onnxruntime, see face.py: host memory, bound where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime as ort

from topw_deploy.errors import GenerationError

if TYPE_CHECKING:
    from topw_deploy.runtime.session import OpenGraph


class Binding:
    """onnxruntime's IO binding without its convenience layer, which costs as much again on every step.

    Host arrays are bound by address and must stay alive and where they are: `bind_array` keeps a reference.
    """

    def __init__(self, session: OpenGraph) -> None:
        self._io = ort.SessionIOBinding(session.raw._sess)
        self._run = session.raw._sess.run_with_iobinding
        self._device = ort.OrtDevice.make(*session.device)._get_c_device()
        self._with_defaults = session.with_defaults
        self._arrays: dict[str, np.ndarray] = {}
        self._bound_outputs: list[str] = []
        self.bind_value = self._io.bind_ortvalue_input  # (name, raw OrtValue): no copy, no Python object
        self.outputs = self._io.get_outputs  # () -> onnxruntime's vector of the last run's, in the order of binding
        self._session = session  # the last, as it lets go of onnxruntime's session when the device is free for that

    def bind_array(self, name: str, array: np.ndarray) -> None:
        """Bind a contiguous host array as an input."""
        self._arrays[name] = array
        if name in self._with_defaults:  # which onnxruntime does not look for among the inputs when it binds an array
            self._io.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array)._ortvalue)
        else:
            self._io.bind_input(name, array)

    def bind_changing(self, name: str, array: np.ndarray) -> None:
        """Bind a host array as `bind_array` does; every run sees what it holds then."""
        self.bind_array(name, array)

    def bind_on_host(self, name: str, array: np.ndarray) -> None:
        """Bind a host array as an input that stays on the host."""
        self.bind_array(name, array)

    def refresh(self, name: str) -> None:
        """Nothing is to be done: runs read the array itself."""

    def bind_memory(self, source: str, target: str, element_type: int, shape: Sequence[int], pointer: int) -> None:
        """Bind memory of the session's device as input `source` and as output `target` at once; it must stay alive."""
        self._bound_outputs.append(target)
        self._io.bind_input(source, self._device, element_type, shape, pointer)
        self._io.bind_output(target, self._device, element_type, shape, pointer)

    def bind_result(self, name: str, array: np.ndarray) -> None:
        """Have every run write output `name` into this contiguous host array of the right shape."""
        self._arrays[name] = array
        self._bound_outputs.append(name)
        self._io.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array)._ortvalue)

    def bind_fresh(self, name: str) -> int:
        """Have the next run allocate output `name` on the session's device; returns its place in `outputs`."""
        self._bound_outputs.append(name)
        self._io.bind_output(name, self._device)
        return len(self._bound_outputs) - 1

    def bind_fresh_again(self, name: str) -> None:
        """Let go of the value of `name` that the last run made: the next run allocates another."""
        self._io.bind_output(name, self._device)

    def another(self) -> Binding:
        """One with nothing bound."""
        return Binding(self._session)

    def close(self) -> None:
        """Nothing is kept for one generation but what its arrays hold."""

    def run(self, step: int | None = None) -> None:
        """Run the graph once. Raises GenerationError with onnxruntime's words; `step` None: a piece of a prompt."""
        self._compute(step, None)

    def _compute(self, step: int | None, options: ort.RunOptions | None) -> None:
        try:
            self._run(self._io, options)
        except Exception as error:  # noqa: BLE001  # onnxruntime raises a dozen unrelated classes
            where = "in the prompt" if step is None else f"at step {step}"
            raise GenerationError(f"onnxruntime failed {where}: {' '.join(str(error).split())[:300]}") from None
