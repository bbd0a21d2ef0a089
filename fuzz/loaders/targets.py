"""All loaders of files and requests, by name."""

from __future__ import annotations

from fuzz.loaders import exports, requests, sources
from fuzz.loaders.loader import Loader, Maker, refusal

__all__ = ["LOADERS", "Loader", "refusal"]

LOADERS: dict[str, Maker] = {
    each.__name__.replace("_", "-"): each
    for each in (
        # exports
        exports.manifest, exports.folder, exports.tokenizer, exports.template,
        exports.session, exports.stamp,
        # sources
        sources.checkpoint, sources.torch_file, sources.torch_pickle, sources.foreign, sources.foreign_config,
        sources.quantised, sources.config, sources.rank_files, sources.sentencepiece, sources.arrays,
        # requests
        requests.prompts, requests.answers, requests.bodies, requests.triton, requests.harness,
    )
}  # fmt: skip
