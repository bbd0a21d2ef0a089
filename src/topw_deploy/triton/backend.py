"""The class that Triton's Python backend calls.

The module `triton_python_backend_utils` exists only in the process of that backend.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from topw_deploy.engine import Engine
from topw_deploy.errors import GenerationError, QueueFullError, TopWError
from topw_deploy.runtime import TopWModel
from topw_deploy.triton.repository import EXPORT, read_request, response_outputs

_ERROR_CODES = ((QueueFullError, "UNAVAILABLE"), (GenerationError, "UNAVAILABLE"), (TopWError, "INVALID_ARG"))
DRAIN_SECONDS = 30.0
"""Time in which running requests may finish when Triton unloads the model."""
POLL_SECONDS = 0.1
"""Time between checks for cancellation, which Triton does not report, of each request that runs or waits."""


class TritonPythonModel:
    """A model and its engine. An event loop in a thread answers the requests, so `execute` returns at once."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the model. Raises the errors of `TopWModel.from_pretrained` and `Engine`."""
        parameters = json.loads(args["model_config"]).get("parameters", {})
        options = {key: json.loads(value["string_value"]) for key, value in parameters.items()}
        folder = Path(args["model_repository"]) / args["model_version"] / EXPORT
        self._model = TopWModel.from_pretrained(folder, **options.get("opening", {}))
        self._engine = Engine(self._model, **options.get("engine", {}))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="topw-triton", daemon=True)
        self._thread.start()
        self._running: set[Future[None]] = set()

    def execute(self, requests: Sequence[Any]) -> None:
        """Start the requests. Each is answered through its own response sender."""
        for request in requests:
            answer = self._answer(request, request.get_response_sender())
            future = asyncio.run_coroutine_threadsafe(answer, self._loop)
            self._running.add(future)
            future.add_done_callback(self._running.discard)

    def finalize(self) -> None:
        """Wait up to DRAIN_SECONDS for the running requests, cancel those that still run, and free the memory."""
        with suppress(TimeoutError):
            self._engine.drain(DRAIN_SECONDS)
        self._engine.shutdown()
        for future in tuple(self._running):
            future.exception()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._model.close()

    async def _answer(self, request: Any, sender: Any) -> None:
        """Send all responses, an error as a response of its own, and the final flag."""
        try:
            task = asyncio.ensure_future(self._send(request, sender))
            while not (await asyncio.wait({task}, timeout=POLL_SECONDS))[0]:
                if sender.is_cancelled():
                    task.cancel()
            if not task.cancelled():
                task.result()
        except Exception as error:  # noqa: BLE001 - one request must not end the server
            sender.send(pb_utils.InferenceResponse(output_tensors=[], error=_triton_error(error)))
        finally:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _send(self, request: Any, sender: Any) -> None:
        """Send the responses, at most until the request is cancelled."""
        prompt, parameters, streams = read_request(lambda name: _input_values(request, name))
        async with aclosing(response_outputs(self._engine, prompt, parameters, streams)) as responses:
            async for outputs in responses:
                if sender.is_cancelled():
                    break
                if outputs:
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor(n, v) for n, v in outputs.items()]))


def _input_values(request: Any, name: str) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def _triton_error(error: Exception) -> Any:
    code = next((code for kind, code in _ERROR_CODES if isinstance(error, kind)), None)
    if code is None:
        pb_utils.Logger.log_error(f"a request failed: {error!r}")
        return pb_utils.TritonError("the server failed; its log has the reason.", pb_utils.TritonError.INTERNAL)
    return pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, code))
