"""`python -m benchmarks.serve`: the other engines serve every request. Here they are stand-ins that count tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import benchmarks.serve
from benchmarks.serve import summary_tables
from topw_deploy.errors import BenchmarkError
from topw_lab.worker import Worker

pytestmark = pytest.mark.slow

REQUESTS = [([5, 9, 40], 4), ([7] * 11, 1), ([8, 3], 6), ([50, 51, 52, 53], 3), ([9], 2)]

GENAI = '''
import enum

EngineErrorCode = enum.Enum("EngineErrorCode", "NONE FAILED")
FinishReason = enum.Enum("FinishReason", "NONE MAX_GENERATED_TOKENS")


class Config:
    def __init__(self, folder):
        pass

    def overlay(self, text):
        pass


class Model:
    def __init__(self, config):
        pass


class RequestOptions:
    def set_max_session_tokens(self, count):
        self.most = count


class TurnOptions:
    def __init__(self, request):
        pass

    def set_do_sample(self, sample):
        assert not sample

    def set_max_generated_tokens(self, count):
        self.most = count

    def set_min_generated_tokens(self, count):
        self.least = count


class Request:
    def __init__(self, options):
        self.options = options

    def begin_turn(self, tokens, turn):
        assert len(tokens) + turn.most == self.options.most
        assert turn.least == turn.most
        self.left = turn.most


class Event:
    def __init__(self, request):
        request.left -= 1
        self.request, self.error_code = request, EngineErrorCode.NONE
        self.finish_reason = FinishReason.NONE if request.left else FinishReason.MAX_GENERATED_TOKENS


class Engine:
    """Static batches of two. EARLY drops the last token of every request."""

    def __init__(self, model):
        self.waiting, self.batch = [], []

    def create_event_buffer(self, capacity):
        return capacity

    def create_request(self, options):
        self.waiting.append(Request(options))
        return self.waiting[-1]

    def has_pending_requests(self):
        return bool(self.waiting or self.batch)

    def run(self, capacity):
        if not self.batch:
            self.batch, self.waiting = self.waiting[:2], self.waiting[2:]
        events = [Event(request) for request in self.batch]
        if EARLY:
            for event in events:
                event.finish_reason, event.request.left = FinishReason.MAX_GENERATED_TOKENS, 0
        self.batch = [request for request in self.batch if request.left]
        return events
'''

LLAMA = '''
import ctypes

LLAMA_FTYPE_ALL_F32 = LLAMA_FTYPE_MOSTLY_Q4_0 = LLAMA_FTYPE_MOSTLY_Q4_1 = LLAMA_FTYPE_MOSTLY_Q4_K_M = 0
LLAMA_FTYPE_MOSTLY_Q8_0 = 0
VOCAB = 64
lengths, drawn = {}, {}


class Settings:
    pass


class Batch:
    def __init__(self, most):
        self.token, self.pos, self.logits, self.n_seq_id = ([0] * most for _ in range(4))
        self.seq_id = [[0] for _ in range(most)]


llama_model_default_params = llama_context_default_params = Settings
llama_log_callback = lambda function: function
llama_backend_init = lambda: None
llama_log_set = lambda *_: None
llama_model_load_from_file = lambda path, settings: path
llama_model_get_vocab = llama_get_memory = lambda value: value
llama_vocab_n_tokens = lambda model: VOCAB
llama_init_from_model = lambda model, settings: settings
llama_batch_init = lambda most, _, rows: Batch(most)


def llama_memory_seq_rm(memory, row, start, end):
    assert (start, end) == (-1, -1)
    del lengths[row]


def llama_decode(context, batch):
    """Requires consecutive positions. The next token is (the last + 1) % VOCAB."""
    assert 0 < batch.n_tokens <= context.n_batch
    for index in range(batch.n_tokens):
        (row,), token = batch.seq_id[index], batch.token[index]
        assert row < context.n_seq_max
        assert batch.pos[index] == lengths.get(row, 0)
        lengths[row] = batch.pos[index] + 1
        drawn[index] = (token + 1) % VOCAB if batch.logits[index] else None
    return 0


def llama_get_logits_ith(context, index):
    assert drawn[index] is not None
    logits = (ctypes.c_float * VOCAB)()
    logits[drawn[index]] = 1.0
    return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
'''


@pytest.fixture(autouse=True)
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "onnxruntime_genai.py").write_text(f"EARLY = False\n{GENAI}", encoding="utf-8")
    (folder / "llama_cpp.py").write_text(LLAMA, encoding="utf-8")
    (folder / "gguf.py").write_text("", encoding="utf-8")
    root = Path(benchmarks.serve.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(root)]))
    return folder


def served(side: str, settings: dict[str, object], callers: int) -> dict[str, object]:
    file = Path(benchmarks.serve.__file__).with_name(f"serve_{side}_worker.py")
    with Worker(side, file, {**settings, "threads": 1}) as worker:
        found = worker.call("serve", requests=REQUESTS, callers=callers)
        assert worker.call("serve", requests=REQUESTS, callers=callers)["first"]
    return dict(found)


@pytest.mark.parametrize("callers", [1, 3])
@pytest.mark.parametrize("side", ["genai", "llama"])
def test_another_engine_draws_every_token_of_every_request(side: str, callers: int) -> None:
    found = served(side, {"folder": "any", "file": "any", "rows": 2, "length": 32}, callers)
    first, between = found["first"], found["between"]
    assert isinstance(first, list)
    assert isinstance(between, list)
    assert len(first) == len(REQUESTS)
    assert len(first) + len(between) == sum(new_tokens for _, new_tokens in REQUESTS)
    assert min([*first, *between]) > 0
    assert max(first) <= float(str(found["seconds"]))


def test_an_engine_that_ends_a_request_early_is_an_error(stand_ins: Path) -> None:
    (stand_ins / "onnxruntime_genai.py").write_text(f"EARLY = True\n{GENAI}", encoding="utf-8")
    with pytest.raises(BenchmarkError, match="the engine drew 5 tokens instead of 16"):
        served("genai", {"folder": "any"}, 2)


def test_the_summary_has_a_row_for_every_load_and_run(tmp_path: Path) -> None:
    ratio = {"median": 1.25, "low": 1.2, "high": 1.3}
    one = {"median": 1.0, "low": 1.0, "high": 1.0}
    sides = {
        "engine": {"seconds": [2.0, 4.0, 3.0], "first": [0.01, 0.02], "ratio": one},
        "genai": {"seconds": [3.0], "first": None, "ratio": ratio},
    }
    shares = {"steady": 0.01, "outside": 0.02, "lost": 0.06}
    latencies = [{"chunked": 0.1, "whole": 0.5, "read": 0.4, "reused": 0.01, "step": 0.001, **shares}]
    runs = [{"threads": 2, "loads": [{"callers": 4, "new_tokens": 300, "sides": sides}], "latencies": latencies}]
    (tmp_path / "a.json").write_text(json.dumps({"settings": {"folder": "demo-int4"}, "runs": runs}), "utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in summary_tables(tmp_path).splitlines()
        if "demo" in line
    ]
    assert rows == [
        ["demo-int4", "2", "4", "100", "10.0", "", "", "", "1.25 (1.20-1.30)", ""],
        [
            "demo-int4",
            "2",
            "1.0 (1.0-1.0) %",
            "2.0 (2.0-2.0) %",
            "6.0 (6.0-6.0) %",
            "100",
            "5.0 (5.0-5.0) x",
            "10.0",
            "40.0 (40.0-40.0) x",
        ],
    ]
