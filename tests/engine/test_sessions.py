"""Sessions that are saved to files and loaded by other engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import A_ROW, HOT, SYSTEM, Gate, NewEngine, ask
from tests.support.hashing_session import FIRST, hashing_model
from tests.support.samples import slow
from tests.support.toy_model import Toy
from tests.support.waiting import until
from topw_deploy.engine import Engine, SessionInfo
from topw_deploy.engine.batch import Batch
from topw_deploy.errors import GenerationError, ParameterError, PromptError, SessionFileError
from topw_deploy.runtime import TopWModel


@pytest.fixture
def saved(model: TopWModel, engine_of: NewEngine, tmp_path: Path) -> Path:
    """A saved chat of one turn: the prompt, and the answer without its last token, which was not read."""
    engine = engine_of(model)
    chat = [*SYSTEM, *ask(engine, SYSTEM).token_ids]
    info = engine.save_session([*chat, 50], tmp_path / "session")
    assert info == SessionInfo(34, (tmp_path / "session").stat().st_size)
    return tmp_path / "session"


def next_turn(model: TopWModel) -> list[int]:
    return [*SYSTEM, *ask(model, SYSTEM).token_ids, 50, 51]


ANOTHER = """
import json, sys
from topw_deploy.engine import Engine
from topw_deploy.runtime import TopWModel
model = TopWModel.from_pretrained(sys.argv[1], provider="cpu", intra_op_num_threads=1)
given = json.loads(sys.argv[3])
with Engine(model, max_batch=2, prefix_bytes=int(sys.argv[4])) as engine:
    engine.load_session(sys.argv[2])
    result = engine.submit(given.pop("prompt"), **given).result(60)
    print(json.dumps([result.token_ids, result.logprobs, result.cached_tokens, engine.stats().prompt_tokens]))
"""


@pytest.mark.parametrize("prefix_bytes", [slow(0), slow(10**6)], ids=["row", "host memory"])
def test_another_process_continues_after_a_saved_session(model: TopWModel, saved: Path, prefix_bytes: int) -> None:
    whole = ask(model, next_turn(model))
    given = json.dumps({"prompt": next_turn(model), "max_new_tokens": 5, "seed": 3, **HOT})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ANOTHER, str(model.path), str(saved), given, str(prefix_bytes)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(ended.stdout) == [whole.token_ids, whole.logprobs, 34, len(next_turn(model)) - 34]


def test_prompts_of_every_length_reuse_a_loaded_session(
    any_model: TopWModel, engine_of: NewEngine, tmp_path: Path
) -> None:
    one = engine_of(any_model, max_batch=2, prefix_bytes=10**6)
    ask(one, SYSTEM)
    one.save_session(SYSTEM, tmp_path / "session")
    for prefix_bytes in (0, 10**6):
        other = engine_of(any_model, max_batch=2, prefix_bytes=prefix_bytes)
        assert other.load_session(tmp_path / "session").tokens == 30
        for prompt, cached in (([*SYSTEM, 77, 78], 30), (SYSTEM, 28), ([*SYSTEM[:27], 60, 61], 27)):
            found = ask(other, prompt)
            assert (found, found.cached_tokens) == (ask(any_model, prompt), cached)


def test_running_sequences_and_snapshots_are_saved(
    model: TopWModel, engine_of: NewEngine, gate: Gate, tmp_path: Path
) -> None:
    """The engine's thread is held in a callback, and makes the copies after it."""
    engine = engine_of(model, max_batch=1, prefix_bytes=10**6)
    ask(engine, [5] * 20)
    gate.after = 8
    running = gate.hold(engine, SYSTEM, max_new_tokens=60, seed=3, **HOT)
    infos: dict[str, SessionInfo] = {}

    def save(name: str) -> None:
        infos[name] = engine.save_session(prompts[name], tmp_path / name)

    prompts = {"stored": [5] * 20, "running": [*SYSTEM, *ask(model, SYSTEM, 60).token_ids]}
    threads = [threading.Thread(target=save, args=(name,)) for name in prompts]
    for thread in threads:
        thread.start()
    until(lambda: engine._worker._inbox.qsize() == 2)
    gate.opened.set()
    for thread in threads:
        thread.join(60)
    assert running.result(60) == ask(model, SYSTEM, 60)
    assert {name: info.tokens for name, info in infos.items()} == {"stored": 20, "running": 30 + 8}
    other = engine_of(model, max_batch=1, prefix_bytes=10**6)
    for name, prompt in prompts.items():
        other.load_session(tmp_path / name)
        longer = [*prompt[: infos[name].tokens], 77, 78]
        found = ask(other, longer)
        assert (found, found.cached_tokens) == (ask(model, longer), infos[name].tokens)


def test_requests_continue_while_sessions_are_saved_and_loaded(
    any_model: TopWModel, engine_of: NewEngine, tmp_path: Path
) -> None:
    """Several threads load into rows and host memory, while rows move and other requests take them."""
    engine = engine_of(any_model, max_batch=3, prefill_budget=6, prefix_bytes=60 * A_ROW)
    ask(engine, SYSTEM)
    engine.save_session(SYSTEM, tmp_path / "0")
    stop, failed = threading.Event(), []

    def load_and_save(name: str) -> None:
        while not stop.is_set():
            try:
                engine.load_session(tmp_path / name)
                engine.save_session(SYSTEM, tmp_path / name)
            except GenerationError as error:
                if "all slots are in use" not in str(error):
                    failed.append(error)

    (tmp_path / "1").write_bytes((tmp_path / "0").read_bytes())
    threads = [threading.Thread(target=load_and_save, args=(name,)) for name in "01"]
    for thread in threads:
        thread.start()
    prompts = [[*SYSTEM[: 5 * (i % 7)], 5 + i % 3, *range(60, 60 + i % 11)] for i in range(60)]
    requests = [engine.submit(prompt, max_new_tokens=1 + i % 9, seed=3, **HOT) for i, prompt in enumerate(prompts)]
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        assert request.result(60) == ask(any_model, prompt, 1 + i % 9)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failed


def test_a_session_needs_room_in_host_memory_or_a_free_row(
    model: TopWModel, engine_of: NewEngine, saved: Path, gate: Gate
) -> None:
    engine = engine_of(model, max_batch=1, prefix_bytes=100)
    running = engine.submit([5] * 9, max_new_tokens=9, stopping_criteria=gate, **HOT)
    gate.open_at_message(engine)
    with pytest.raises(
        GenerationError,
        match=r"takes 6\.8 kB, but prefix_bytes is 100 bytes and all slots are in use; create the engine with a higher",
    ):
        engine.load_session(saved)
    running.result(60)
    engine.load_session(saved)
    assert ask(engine, next_turn(model)).cached_tokens == 34


def test_a_session_whose_states_fit_host_memory_only_in_part_is_loaded_into_a_row(
    model: TopWModel, engine_of: NewEngine, tmp_path: Path
) -> None:
    """Of 10 tokens, the keys take 160 bytes with the tokens, and the sum of fixed size takes 88."""
    hashing, prompt = hashing_model(model, "recurrent"), [FIRST, FIRST + 1] * 5
    engine = engine_of(hashing, prefix_bytes=10**6)
    ask(engine, prompt)
    assert engine.save_session(prompt, tmp_path / "session").tokens == 10
    for prefix_bytes in (247, 248):
        other = engine_of(hashing, prefix_bytes=prefix_bytes)
        other.load_session(tmp_path / "session")
        assert len(other._worker._prefixes._snapshots) == (2 if prefix_bytes == 248 else 0)
        assert ask(other, [*prompt, FIRST]).cached_tokens == 10


def test_a_device_without_a_place_for_a_session_says_so(
    model: TopWModel, engine_of: NewEngine, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More host memory would not help, because states of devices are not stored there."""
    hashing, prompt = hashing_model(model, "recurrent"), [FIRST, FIRST + 1] * 5
    options: dict[str, Any] = {"max_batch": 1, "prefill_budget": 5, "prefix_bytes": 10**6, "exact": True}
    engine = engine_of(hashing, **options)
    ask(engine, prompt)
    engine.save_session(prompt, tmp_path / "session")
    monkeypatch.setattr(Batch, "copies_slots", False)
    with pytest.raises(GenerationError, match=r"exact engine on a device cannot load a session .* without exact=True"):
        engine_of(hashing, **options).load_session(tmp_path / "session")
    busy = engine_of(hashing, **{**options, "exact": False})
    running = busy.submit([FIRST + 2] * 3, max_new_tokens=9, ignore_eos=True, stopping_criteria=gate)
    gate.open_at_message(busy)
    with pytest.raises(GenerationError, match="all slots are in use, and a device has no other place for a session"):
        busy.load_session(tmp_path / "session")
    running.result(60)


def test_a_loaded_session_takes_the_row_that_holds_least_and_stores_what_it_loses(
    model: TopWModel, engine_of: NewEngine, saved: Path
) -> None:
    engine = engine_of(model, max_batch=2, prefix_bytes=33 * (A_ROW + 8))
    ask(engine, [5] * 20)
    ask(engine, [6] * 10)
    engine.load_session(saved)  # in place of the first, which is stored
    for prompt, cached in (([*[5] * 20, 1, 2], 20), (next_turn(model), 34)):
        found = ask(engine, prompt, 1)
        assert (found, found.cached_tokens) == (ask(model, prompt, 1), cached)


def test_the_text_of_a_session_is_encoded_like_a_prompt(model: TopWModel, engine_of: NewEngine, tmp_path: Path) -> None:
    engine = engine_of(model)
    result = engine.submit("def parse(", max_new_tokens=1).result(60)
    assert engine.save_session("def parse(", tmp_path / "session").tokens == result.prompt_tokens
    plain = len(model.tokenizer.encode("def parse(", False))
    other = engine_of(model)
    other.load_session(tmp_path / "session")
    assert other.save_session("def parse(", tmp_path / "again").tokens == result.prompt_tokens
    assert engine.submit("def parse(", max_new_tokens=1, add_special_tokens=False).result(60).prompt_tokens == plain
    assert engine.save_session("def parse(", tmp_path / "again", add_special_tokens=False).tokens == plain


def test_prompts_and_files_that_cannot_be_saved_or_loaded_are_refused(
    model: TopWModel, engine_of: NewEngine, saved: Path, tmp_path: Path, load: Any
) -> None:
    engine = engine_of(model)
    with pytest.raises(GenerationError, match="holds no states after a beginning of the 2 tokens; generate from them"):
        engine.save_session([1, 2], tmp_path / "none")
    with pytest.raises(PromptError, match="there are 2 prompts, but a session has one"):
        engine.save_session([[1, 2], [3]], tmp_path / "none")
    with pytest.raises(PromptError, match="token id 1000"):
        engine.save_session([1, 1000], tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(SessionFileError, match="it has 34 tokens, but a slot of the engine has 1 to 20"):
        engine_of(model, max_length=20).load_session(saved)
    with pytest.raises(SessionFileError, match="it belongs to another export"):
        engine_of(load(Toy.random(7))).load_session(saved)
    off = engine_of(model, reuse_prefixes=False)
    for call in (lambda: off.load_session(saved), lambda: off.save_session([1], saved)):
        with pytest.raises(ParameterError, match="reuse_prefixes is False"):
            call()
    assert ask(engine, [7, 8, 9]) == ask(model, [7, 8, 9])


def test_a_drained_engine_saves_and_one_that_was_shut_down_does_not(
    model: TopWModel, saved: Path, tmp_path: Path
) -> None:
    engine = Engine(model)
    ask(engine, SYSTEM)
    engine.drain(60)
    assert engine.save_session(SYSTEM, tmp_path / "drained").tokens == 30
    with pytest.raises(GenerationError, match="accepts no more requests"):
        engine.load_session(saved)
    engine.shutdown()
    with pytest.raises(GenerationError, match="the engine is shut down; create a new Engine"):
        engine.save_session(SYSTEM, tmp_path / "late")


def test_a_call_during_shutdown_returns_or_fails_but_never_hangs(model: TopWModel, tmp_path: Path) -> None:
    for turn in range(20):
        engine = Engine(model, max_batch=1)
        ask(engine, SYSTEM, 1)
        errors: list[str] = []

        def save(engine: Engine = engine, errors: list[str] = errors) -> None:
            try:
                while True:
                    engine.save_session(SYSTEM, tmp_path / threading.current_thread().name)
            except GenerationError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=save, daemon=True, name=f"{turn}-{n}") for n in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.002 * turn)  # another moment in each turn
        engine.shutdown()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert errors == ["the engine is shut down; create a new Engine."] * 2
