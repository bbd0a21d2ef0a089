"""The reference that an export is compared with: the torch model, or another exporter's ONNX decoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from topw_deploy.export.verification.cache_drivers import cache_driver, empty_states
from topw_deploy.export.verification.probe import open_session
from topw_deploy.manifest import DecoderInfo
from topw_deploy.sampling import Geometry


class Reference(Protocol):
    """A source of logits for sequences without padding.

    name: as shown in results.
    """

    name: str

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """The logits after each of ids [n]: float32 [n, vocab]."""

    def logits_by_runs(self, ids: np.ndarray, runs: Sequence[int]) -> np.ndarray:
        """The logits at the end of each run: float32 [runs, vocab].

        runs: the sizes of the runs into which `ids` is split. How it is split can affect rounding.
        """


class TorchReference:
    """A transformers checkpoint, computed in float32.

    dtype: of the export; the weights are rounded to it.
    """

    name = "torch"

    def __init__(self, folder: Path, dtype: str, num_hidden_layers: int | None, trust_remote_code: bool) -> None:
        from topw_deploy.export.source.checkpoint import load_reference

        model = load_reference(folder, dtype, num_hidden_layers=num_hidden_layers, trust_remote_code=trust_remote_code)
        self.model = model.float()  # after rounding to the exported type

    @property
    def parameters(self) -> int:
        """The number of weights."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def logits(self, ids: np.ndarray) -> np.ndarray:
        import torch

        with torch.no_grad():
            return self.model(input_ids=torch.from_numpy(ids)[None]).logits[0].float().numpy()

    def logits_by_runs(self, ids: np.ndarray, runs: Sequence[int]) -> np.ndarray:
        return self.logits(ids)[np.cumsum(runs) - 1]

    def geometry(self, metric: str, vocab: int) -> Geometry:
        """The geometry of the first `vocab` rows of the embedding table."""
        if metric == "uniform":
            return Geometry.uniform()
        return Geometry.from_embeddings(self.model.get_input_embeddings().weight[:vocab].detach().numpy(), metric)


class OriginalDecoderReference:
    """The ONNX decoder onto which a sampler was grafted.

    MatMulNBits on a CPU may round activations to 8 bits. A difference in the last digit of a float32, such as there is
    between single steps and a whole prompt, can then change a rounding and grow (measured: 0.11, for logits up to 16).
    So `logits_by_runs` splits the ids as the export's decoder does.
    """

    name = "the original decoder"

    def __init__(self, onnx: Path, decoder: DecoderInfo) -> None:
        self._session = open_session(str(onnx.resolve() if onnx.is_symlink() else onnx))
        self._decoder = decoder
        self._inputs = {value.name for value in self._session.get_inputs()}

    def logits(self, ids: np.ndarray) -> np.ndarray:
        rows = self._run(ids)
        if len(rows) == len(ids):
            return rows
        return np.concatenate(
            [self._run(ids[: n + 1]) for n in range(len(ids))]
        )  # the graph returns only the last logits

    def logits_by_runs(self, ids: np.ndarray, runs: Sequence[int]) -> np.ndarray:
        driver = cache_driver(self._session, self._decoder, "logits")
        driver.start(1)
        rows, start = [], 0
        for size in runs:
            found = driver.step(ids[None, start : start + size], np.ones((1, start + size), np.int64))
            rows.append(found[0, -1].astype(np.float32))
            start += size
        return np.stack(rows)

    def _run(self, ids: np.ndarray) -> np.ndarray:
        n = len(ids)
        feeds = {
            "input_ids": ids[None],
            "attention_mask": np.ones((1, n), np.int64),
            "position_ids": np.arange(n)[None],
            **self._empty_caches(n),
        }
        (logits,) = self._session.run(["logits"], {name: feeds[name] for name in self._inputs})
        return logits[0].astype(np.float32)

    def _empty_caches(self, tokens: int) -> dict[str, np.ndarray]:
        decoder = self._decoder
        length = max(tokens, decoder.buffer_least) if decoder.kv_form == "shared" else 0
        return empty_states(decoder, 1, length)
