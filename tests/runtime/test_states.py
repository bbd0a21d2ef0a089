"""Models with states other than the keys and values of all tokens: windows, convolutions, recurrences."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.hybrid_models import make_hybrid
from tests.support.tiny_models import export, make_model, write_tokenizer
from topw_deploy.errors import ManifestError
from topw_deploy.manifest import load_decoder_manifest, save_manifest
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.ort import graph_session

pytestmark = pytest.mark.slow

FORMS = {
    "onnxruntime": {},
    "standard": {"target": "tensorrt", "max_length": 128},
    "concat": {"kv": "concat"},
}
PROMPTS = [np.random.default_rng(n).integers(3, 280, n).tolist() for n in (1, 37, 5, 37, 2)]
NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    made: dict[tuple[str, str], Path] = {}

    def of(family: str, form: str) -> Path:
        if (family, form) not in made:
            base = tmp_path_factory.mktemp(f"{family}_{form}")
            model = make_model("gemma3") if family == "gemma3" else make_hybrid(family)
            model.save_pretrained(base / "model")
            write_tokenizer(base / "model")
            export(base / "model", base / "out", **FORMS[form])
            made[family, form] = base / "out"
        return made[family, form]

    return of


def tokens(model: TopWModel, prompts: list[list[int]]) -> list[list[int]]:
    results = model.generate(prompts, max_new_tokens=NEW, seed=list(range(len(prompts))), ignore_eos=True)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("chunk", [8, None], ids=["chunks", "whole"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.broad), "gemma3"])
def test_rows_of_different_lengths_draw_what_they_draw_alone(
    folder: Callable[[str, str], Path], family: str, form: str, chunk: int | None
) -> None:
    """Prompts of one token, of equal lengths, and longer than a window, a chunk and a run."""
    with TopWModel.from_pretrained(folder(family, form), prefill_chunk=chunk) as model:
        together = tokens(model, PROMPTS)
    with TopWModel.from_pretrained(folder(family, form)) as model:
        for row, prompt in enumerate(PROMPTS):
            alone = model.generate(prompt, max_new_tokens=NEW, seed=row, ignore_eos=True)
            assert together[row] == alone.token_ids
        assert tokens(model, PROMPTS) == together  # buffers that were used before are cleared


def test_a_window_takes_the_memory_of_its_tokens(folder: Callable[[str, str], Path]) -> None:
    """One of two layers has a window of 8: 2 x 2 heads x 8 numbers x 4 bytes per token and layer."""
    info = load_decoder_manifest(folder("gemma3", "onnxruntime")).decoder
    assert info.state_bytes() == {"full": (0, 128), "window": (8 * 128, 0)}
    assert (info.evicts, info.recurs, info.least_onnxruntime) == (True, True, "1.29")
    with TopWModel.from_pretrained(folder("gemma3", "onnxruntime"), max_length=256) as model:
        assert model.cache_bytes == 128 * (256 + 8)


def test_an_older_onnxruntime_is_refused_by_version(
    folder: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_session.ort, "__version__", "1.28.2")
    with pytest.raises(ManifestError, match=r"onnxruntime 1.29, and this is 1.28.2; .* or export with --no-w"):
        TopWModel.from_pretrained(folder("gemma3", "onnxruntime"))
    TopWModel.from_pretrained(folder("lfm2", "onnxruntime")).close()  # needs 1.25


def test_all_tokens_of_a_window_are_kept_on_request(tmp_path: Path, folder: Callable[[str, str], Path]) -> None:
    source = folder("gemma3", "onnxruntime")
    export(source.parent / "model", tmp_path / "out", window_cache=False)
    manifest = load_decoder_manifest(tmp_path / "out")
    assert {state.kind for state in manifest.decoder.states} == {"full"}
    assert manifest.decoder.least_onnxruntime == ""
    with TopWModel.from_pretrained(tmp_path / "out") as model, TopWModel.from_pretrained(source) as window:
        assert tokens(model, PROMPTS) == tokens(window, PROMPTS)


def test_a_state_of_another_size_than_the_graphs_is_refused(folder: Callable[[str, str], Path], tmp_path: Path) -> None:
    shutil.copytree(folder("lfm2", "onnxruntime"), tmp_path / "out")
    manifest = load_decoder_manifest(tmp_path / "out")
    wrong = tuple(
        replace(state, shape=(state.shape[0], 7)) if state.kind == "convolution" else state
        for state in manifest.decoder.states
    )
    save_manifest(tmp_path / "out", replace(manifest, decoder=replace(manifest.decoder, states=wrong)))
    with pytest.raises(ManifestError, match=r"but the manifest states float with rows of \[\d+, 7\]"):
        TopWModel.from_pretrained(tmp_path / "out")
