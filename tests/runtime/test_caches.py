"""Every cache form, with the operators of real decoders, gives the reference's tokens."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.samples import slow
from tests.support.toy_graph import FORMS
from tests.support.toy_model import BOS, CONTEXT, PAD, Toy, byte_ids, export
from topw_deploy.errors import GenerationError, ParameterError, PromptError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.cache.buffers import Buffers, MemoryPool
from topw_deploy.runtime.ort.session import HostBinding
from topw_deploy.sampling import TopWOptions, TopWParameters

IN_PLACE = FORMS[1:]
HOT: dict[str, Any] = {"temperature": 2.0, "lam": 0.3, "ignore_eos": True}
PROMPTS = ["a", "some much longer prompt than the others", "middle one", "four of them", "b"]
STEP = 8  # short, so that scatter's buffers grow often

Open = Callable[..., TopWModel]


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy.random(1, options=TopWOptions(top_m=64, metric="mahalanobis"))


@pytest.fixture(scope="module")
def folders(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("forms")
    return {form: export(root / form, toy, form=form, buffer_step=STEP * (form == "scatter")) for form in FORMS}


@pytest.fixture
def opened(folders: dict[str, Path]) -> Open:
    def open_form(form: str, **settings: Any) -> TopWModel:
        return TopWModel.from_pretrained(folders[form], provider="cpu", intra_op_num_threads=1, **settings)

    return open_form


def tokens(model: TopWModel, prompts: Any, **settings: Any) -> list[list[int]]:
    results = model.generate(prompts, **{**HOT, "max_new_tokens": 20, "seed": 5, **settings})
    return [result.token_ids for result in (results if isinstance(results, list) else [results])]


@pytest.mark.parametrize("chunk", [None, slow(1), 3, slow(5), slow(16)])
@pytest.mark.parametrize("form", FORMS)
def test_every_token_equals_the_reference_in_whatever_pieces_the_prompt_goes_in(
    opened: Open, toy: Toy, form: str, chunk: int | None
) -> None:
    expected = toy.expect(byte_ids("sixteen letters!"), 40, TopWParameters(temperature=2.0, lam=0.3), seed=5)
    (found,) = tokens(opened(form, prefill_chunk=chunk), "sixteen letters!", max_new_tokens=40)
    assert found == [row.next_token for row in expected]


@pytest.mark.parametrize("chunk", [slow(None), slow(1), 4, slow(40)])  # 40: middle rows share a run
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_different_lengths_equal_those_run_alone(opened: Open, form: str, chunk: int | None) -> None:
    model = opened(form, prefill_chunk=chunk)
    columns: dict[str, list[Any]] = {
        "max_new_tokens": [30, 3, 17, 50, 2],  # different ends
        "seed": [1, 2, 3, 4, 5],
        "temperature": [0.0, 2.0, 1.0, 3.0, 2.0],
        "lam": [2.2, 0.3, 0.5, 0.1, 0.3],
        "geom_scale": [1.0, -0.5, 0.0, 1.0, 1.0],
        "repetition_penalty": [1.0, 1.3, 1.0, 0.9, 1.0],
        "logit_bias": [{}, {100: 3.0}, {40: -np.inf}, {}, {}],
        "stop_strings": [["zz"], ["q"], ["x", "yy"], ["never"], []],
    }
    together = tokens(model, PROMPTS, **columns)
    for row, prompt in enumerate(PROMPTS):
        assert [together[row]] == tokens(model, prompt, **{name: values[row] for name, values in columns.items()})


@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("chunk", [slow(None), 4, slow(20)])
def test_rows_of_equal_lengths_equal_those_run_alone_in_a_foreign_graph(
    toy: Toy, tmp_path: Path, chunk: int | None, padding: bool
) -> None:
    folder = export(tmp_path / "out", toy, form="shared", padding=padding)
    model = TopWModel.from_pretrained(folder, provider="cpu", prefill_chunk=chunk)
    prompts = ["ten letter", "other word", "that makes"]
    columns = {"max_new_tokens": [30, 3, 17], "seed": [1, 2, 3]}
    together = tokens(model, prompts, **columns)
    for row, prompt in enumerate(prompts):
        assert [together[row]] == tokens(model, prompt, **{name: values[row] for name, values in columns.items()})


@pytest.mark.parametrize("form", IN_PLACE)
def test_states_of_earlier_requests_in_the_buffers_change_no_token(opened: Open, form: str) -> None:
    model = opened(form)
    fresh = tokens(opened(form), "ab")
    for prompt in ("a long prompt that fills many columns of it", "x", ["one", "two"]):
        tokens(model, prompt, max_new_tokens=CONTEXT)
        assert tokens(model, "ab") == fresh


@pytest.mark.parametrize("form", IN_PLACE)
def test_nan_in_the_cache_of_a_request_does_not_reach_the_next(toy: Toy, tmp_path: Path, form: str) -> None:
    broken = Toy(**{name: getattr(toy, name) for name in Toy.__dataclass_fields__} | {"features": toy.features.copy()})
    broken.features[PAD] = np.nan
    model = TopWModel.from_pretrained(
        export(tmp_path / "out", broken, form=form, buffer_step=STEP * (form == "scatter"))
    )
    before = tokens(model, "ab")
    with pytest.raises(GenerationError, match="row 0 is invalid at step 0"):
        tokens(model, [*[BOS] * 6, *[PAD] * 60])  # beyond the next prompt, where its buffers grow
    assert tokens(model, "ab") == before


@pytest.mark.parametrize("form", ["scatter", "grouped"])
def test_a_step_binds_nothing(opened: Open, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and caches stay bound; scatter binds again when its buffer grows."""
    runs, bound = [0], []
    original = HostBinding.run

    def counted(self: HostBinding, step: int | None = None) -> None:
        runs[0] += 1
        original(self, step)

    monkeypatch.setattr(HostBinding, "run", counted)

    def watch(name: str) -> None:
        method = getattr(HostBinding, name)

        def watched(self: HostBinding, *arguments: Any) -> Any:
            bound.append(runs[0])
            return method(self, *arguments)

        monkeypatch.setattr(HostBinding, name, watched)

    for name in ("bind_array", "bind_memory", "bind_result", "bind_fresh_again"):
        watch(name)
    tokens(opened(form), "four", max_new_tokens=30)
    later = [run for run in bound if run > 1]  # a step's inputs are bound once
    growths = (4 + 29 - 1) // STEP if form == "scatter" else 0
    assert len(later) == growths * 4  # two layers
    assert runs == [30]


def test_a_buffer_grows_with_its_rows_but_not_beyond_their_token_limits(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    original = Buffers.grow

    def watched(self: Buffers, length: int) -> None:
        original(self, length)
        lengths.append(self.length)

    monkeypatch.setattr(Buffers, "grow", watched)
    model = opened("scatter")
    expected = tokens(opened("grouped"), ["a", "some prompt"], max_new_tokens=[60, 5])
    assert tokens(model, ["a", "some prompt"], max_new_tokens=[60, 5]) == expected
    # 16 columns hold the prompts and the long row's end; the short row continues to 60
    assert lengths == [24, 32, 40, 48, 56, 64]


@pytest.mark.parametrize("form", FORMS)
def test_a_row_may_go_on_when_another_has_filled_the_context(opened: Open, form: str) -> None:
    """The ended row must stay within its buffer."""
    model = opened(form, max_length=40)
    if form == "shared":
        assert [len(row) for row in tokens(model, ["a" * 37, "b" * 37], max_new_tokens=[2, 9])] == [2, 3]
        return
    long, short = tokens(model, ["a" * 37, "b"], max_new_tokens=CONTEXT)
    assert (len(long), len(short)) == (3, 39)
    assert [short] == tokens(model, "b", max_new_tokens=CONTEXT)
    full, other = tokens(model, ["a" * 40, "b"], max_new_tokens=CONTEXT)
    assert (full, other) == ([], short)


@pytest.mark.parametrize("form", IN_PLACE)
def test_max_length_bounds_a_sequence_as_the_context_does(opened: Open, form: str) -> None:
    model = opened(form, max_length=20)
    assert len(tokens(model, "a" * 15, max_new_tokens=50)[0]) == 5
    assert tokens(model, "a" * 20) == [[]]
    with pytest.raises(ParameterError, match=f"max_length is {CONTEXT + 1}, but the model's context holds {CONTEXT}"):
        opened(form, max_length=CONTEXT + 1)
    with pytest.raises(PromptError, match="has 21 tokens, but the model was opened with max_length 20; shorten it, or"):
        model.generate("a" * 21)
    with pytest.raises(PromptError, match=f"the model's context holds {CONTEXT}"):
        model.generate("a" * (CONTEXT + 1))


def test_max_batch_bounds_the_sequences_of_a_call(opened: Open) -> None:
    model = opened("grouped", max_batch=2)
    assert len(tokens(model, ["a", "b"])) == 2
    with pytest.raises(PromptError, match="has 4 sequences, but the model takes 2 at a time; give fewer"):
        model.generate(["a", "b"], num_return_sequences=2)


@pytest.mark.parametrize("name", ["max_length", "max_batch", "prefill_chunk"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "many"])
def test_wrong_sizes_are_errors(opened: Open, name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"{name} is {value!r}, but must be an integer >= 1"):
        opened("grouped", **{name: value})


@pytest.mark.parametrize("form", ["scatter", "grouped"])
def test_memory_for_the_sizes_of_opening_is_allocated_once(opened: Open, form: str) -> None:
    model = opened(form, max_length=80, max_batch=3)
    per_token = 4 * 2 * sum({"scatter": (4, 3), "grouped": (8, 16)}[form])
    assert model.cache_bytes >= 3 * 80 * per_token
    sizes = {model.cache_bytes}
    for prompt in ("a", ["b", "c", "d"], "e" * 70):
        tokens(model, prompt, max_new_tokens=CONTEXT)
        sizes.add(model.cache_bytes)
    assert len(sizes) == 1


@pytest.mark.parametrize("form", IN_PLACE)
def test_without_sizes_memory_follows_the_largest_request(opened: Open, form: str) -> None:
    model = opened(form)
    assert model.cache_bytes == 0
    sizes = []
    for prompt in ("a", "b" * 50, "c", ["d" * 50, "e" * 50], "f"):
        tokens(model, prompt, max_new_tokens=20)
        sizes.append(model.cache_bytes)
    assert 0 < sizes[0] < sizes[1] == sizes[2] < sizes[3] == sizes[4]


@pytest.mark.parametrize("form", IN_PLACE)
def test_threads_that_generate_at_once_have_buffers_of_their_own(opened: Open, form: str) -> None:
    model = opened(form)
    prompts = ["first", "second prompt", "third"]
    alone = [tokens(model, prompt, max_new_tokens=60) for prompt in prompts]
    kept, found = model.cache_bytes, {}

    def work(index: int) -> None:
        found[index] = [tokens(model, prompts[index], max_new_tokens=60) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(3)] == [[row] * 5 for row in alone]
    assert model.cache_bytes == kept


@pytest.mark.parametrize("form", IN_PLACE)
def test_a_stream_holds_its_buffers_until_it_ends_or_is_closed(opened: Open, form: str) -> None:
    model = opened(form)
    whole = tokens(model, "same", max_new_tokens=60)
    kept = model.cache_bytes
    first = model.stream("same", **HOT, seed=5, max_new_tokens=60)
    next(first)
    assert tokens(model, "same", max_new_tokens=60) == whole  # in temporary buffers
    assert model.cache_bytes == 2 * kept
    del first
    assert model.cache_bytes == kept
    assert tokens(model, "same", max_new_tokens=60) == whole


def test_garbage_collection_may_close_a_forgotten_stream_while_another_one_begins(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in any thread that allocates, and so in one that holds the lock of the buffers."""
    model, new = opened("grouped"), MemoryPool._allocate
    whole = tokens(model, "same")
    stream: list[Any] = [model.stream("same", **HOT, seed=5, max_new_tokens=60)]
    next(stream[0])
    stream.append(stream)  # a cycle
    found, collected = list[Any](), list[int]()

    def collecting(pool: MemoryPool, batch: int, length: int) -> Any:
        collected.append(gc.collect())
        return new(pool, batch, length)

    monkeypatch.setattr(MemoryPool, "_allocate", collecting)
    gc.disable()
    try:
        del stream
        thread = threading.Thread(target=lambda: found.append(tokens(model, "same")), daemon=True)
        thread.start()
        thread.join(60)
    finally:
        gc.enable()
    assert collected
    assert found == [whole], "the thread waits for itself"


@pytest.mark.parametrize("form", FORMS)
def test_a_closed_model_has_freed_session_and_memory(opened: Open, form: str) -> None:
    model = opened(form)
    tokens(model, "a")
    session = weakref.ref(model._session)
    model.close()
    assert session() is None
    assert model.cache_bytes == 0
