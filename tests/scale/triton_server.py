"""Runs the model repository in a real Triton server, as `make triton` does, and compares its answers with the model's.

.triton/bin/python -m tests.scale.triton_server        exports the bundled model with .venv, prints what it saw as JSON

The server comes from the package nvidia-pytriton, which also has a stub of the Python backend for each Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tests.scale import free_port, until
from topw_deploy.runtime import TopWModel
from topw_deploy.triton.repository import write_repository

ROOT = Path(__file__).parents[2]
CPU = {"provider": "cpu", "intra_op_num_threads": 1}
# exact: without it, a draw can differ from the model's alone, as a step of several rows rounds differently.
ENGINE = {"max_batch": 4, "max_queue": 508, "exact": True}
CAPACITY = ENGINE["max_batch"] + ENGINE["max_queue"]
HOT = {"temperature": 1.5, "lam": 0.3, "max_new_tokens": 40}


@contextlib.contextmanager
def server(repository: Path, place: Path) -> Iterator[str]:
    """A tritonserver over the repository; gives its gRPC address."""
    site = Path(sysconfig.get_paths()["purelib"])
    binaries = site / "pytriton" / "tritonserver"
    backend = place / "backends" / "python"
    shutil.copytree(binaries / "backends" / "python", backend)
    stub = binaries / "python_backend_stubs" / f"{sys.version_info[0]}.{sys.version_info[1]}"
    shutil.copy2(stub / "triton_python_backend_stub", backend)
    (backend / "triton_python_backend_stub").chmod(0o755)
    (binaries / "bin" / "tritonserver").chmod(0o755)
    libraries = [site / "nvidia_pytriton.libs", binaries / "lib", Path(str(sysconfig.get_config_var("LIBDIR")))]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        # The stub takes the packages of this Python, which it finds by PATH; it ignores PYTHONPATH.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    port = free_port()
    options = {"model-repository": repository, "backend-directory": place / "backends", "grpc-address": "127.0.0.1"}
    options |= {"grpc-port": port, "allow-http": "false", "allow-metrics": "false"}
    words = [f"--{name}={value}" for name, value in options.items()]
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(binaries / "bin" / "tritonserver"), *words], env=environment, stdout=log, stderr=log
        )
    try:
        with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            for _ in range(600):
                if process.poll() is not None:
                    raise SystemExit((place / "log").read_text("utf-8", "replace")[-8000:])
                with contextlib.suppress(grpc.InferenceServerException):
                    if client.is_model_ready("demo"):
                        break
                time.sleep(0.2)
            else:
                raise SystemExit("Triton did not load the model within two minutes")
        yield f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def inputs(**values: Any) -> list[Any]:
    """Triton's inputs from arrays, texts and numbers."""
    found = []
    kinds = {"text_input": "BYTES", "parameters": "BYTES", "input_ids": "INT64", "seed": "UINT64", "stream": "BOOL"}
    types = {"BYTES": np.object_, "INT64": np.int64, "UINT64": np.uint64, "BOOL": np.bool_}
    for name, value in values.items():
        raw = [value.encode()] if isinstance(value, str) else value if isinstance(value, list) else [value]
        array = np.array(raw, types[kinds[name]])
        tensor = grpc.InferInput(name, list(array.shape), kinds[name])
        tensor.set_data_from_numpy(array)
        found.append(tensor)
    return found


def ask(address: str, *requests: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Send requests at once over one stream. Returns the responses of each; an error is {"error": text}."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    found: list[list[dict[str, Any]]] = [[] for _ in requests]
    with grpc.InferenceServerClient(address) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for index, values in enumerate(requests):
            client.async_stream_infer("demo", inputs(**values), request_id=str(index), enable_empty_final_response=True)
        left = len(requests)
        while left:
            result, error = answers.get(timeout=120)
            if error is not None:  # has no id: errors are asked for one by one
                found[0].append({"error": str(error)})
                break
            response = result.get_response()
            if response.outputs:
                found[int(response.id)].append(_values(result))
            left -= response.parameters["triton_final_response"].bool_param
        client.stop_stream()
    return found


class StreamedRequest:
    """One request on a stream of its own.

    ended: number of its sequences that have ended.
    error: text of an error; "" without one.
    final: set after the last response.
    """

    def __init__(self, address: str, sequences: int, tokens: int) -> None:
        self.ended, self.error, self.final = 0, "", threading.Event()
        self._client = grpc.InferenceServerClient(address)
        self._client.start_stream(callback=self._receive)
        parameters = {**HOT, "n": sequences, "max_new_tokens": tokens, "ignore_eos": True}
        values = {"text_input": "def parse(", "parameters": json.dumps(parameters)}
        self._client.async_stream_infer("demo", inputs(**values), enable_empty_final_response=True)

    def _receive(self, result: Any, error: Any) -> None:
        if error is not None:
            self.error = str(error)
            self.final.set()
            return
        response = result.get_response()
        self.ended += bool(response.outputs)
        if response.parameters["triton_final_response"].bool_param:
            self.final.set()

    def close(self, cancel: bool = False) -> None:
        """cancel: whether to cancel the request if it runs."""
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


def cancel(address: str) -> dict[str, int]:
    """Cancel a request that waits and one that runs, and check that others get their places in the engine.

    `long` takes the rows and most of the queue, for minutes; `waiting` takes the rest, so that `other` is refused.
    """
    long = StreamedRequest(address, CAPACITY - 36, 450)
    until(lambda: long.ended > 0, "the first of many sequences")
    waiting = StreamedRequest(address, 36 + long.ended, 450)
    other = StreamedRequest(address, 30, 2)
    assert other.final.wait(120)
    assert "sequences" in other.error, other.error
    other.close()
    waiting.close(cancel=True)
    while True:
        ended = long.ended
        other = StreamedRequest(address, 30, 2)
        if not other.final.wait(5):
            break
        other.close()
    assert ended < 30, "the room was not that of the cancelled request"
    assert not other.error
    long.close(cancel=True)
    assert other.final.wait(120)
    assert (other.error, other.ended) == ("", 30)
    other.close()
    whole = StreamedRequest(address, CAPACITY, 1)
    assert whole.final.wait(120)
    assert (whole.error, whole.ended) == ("", CAPACITY)
    whole.close()
    return {"sequences": CAPACITY - 36, "ended": long.ended}


def _values(result: Any) -> dict[str, Any]:
    text, reason = (result.as_numpy(name)[0].decode() for name in ("text_output", "finish_reason"))
    return {"text": text, "reason": reason, "ids": result.as_numpy("token_ids").tolist()}


def main() -> None:
    place = Path(tempfile.mkdtemp(prefix="topw-triton"))
    started = time.perf_counter()
    exported = place / "demo"
    python = str(ROOT / ".venv" / "bin" / "python")
    command = [python, "-m", "topw_deploy", "export", "tiny", str(exported), "--no-verify"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else exported
    if folder == exported:
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    written = write_repository(folder, place / "models", name="demo", engine=ENGINE, opening=CPU)
    text_format.Parse((written / "config.pbtxt").read_text("utf-8"), model_config_pb2.ModelConfig())
    with TopWModel.from_pretrained(folder, **CPU) as model:
        wanted = [model.generate("def parse(", seed=seed, **HOT) for seed in range(8)]
        ids = model.tokenizer.encode("def parse(")
    parameters = json.dumps(HOT)
    with server(place / "models", place) as address:
        whole = [{"text_input": "def parse(", "parameters": parameters, "seed": seed} for seed in range(8)]
        answers = ask(address, *whole)
        assert [each[0]["ids"] for each in answers] == [each.token_ids for each in wanted]
        assert [each[0]["text"] for each in answers] == [each.text for each in wanted]
        streams = ask(address, *({**each, "stream": True} for each in whole))
        for pieces, each in zip(streams, wanted, strict=True):
            assert len(pieces) > 5
            assert "".join(piece["text"] for piece in pieces) == each.text
            assert pieces[-1]["ids"] == each.token_ids
        by_ids = ask(address, {"input_ids": ids, "parameters": parameters, "seed": 3})
        assert by_ids[0][0]["ids"] == wanted[3].token_ids
        refused = ask(address, {"text_input": "a", "parameters": '{"tempreature": 1}'})
        assert "tempreature" in refused[0][0]["error"]
        cancelled = cancel(address)
        again = ask(address, whole[0])
        assert again[0][0]["ids"] == wanted[0].token_ids
    seconds = time.perf_counter() - started
    sys.stdout.write(f"Triton gave the model's tokens: {len(whole)} at once, {len(whole)} streams; {seconds:.0f} s\n")
    ended, all_ = cancelled["ended"], cancelled["sequences"]
    sys.stdout.write(f"a cancelled request ended after {ended} of its {all_} sequences\n")
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
