"""Text that a quantised decoder is measured on: the demo model's own held-out documents, a page of prose for others."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from topw_deploy.errors import TokenizerError
from topw_deploy.export.verification.quantised_checks import TOKENS, Text
from topw_deploy.manifest import Manifest, open_listed

_PAGE = """The river had been rising since noon. By four o'clock it had covered the stepping stones below the mill, and
the children who crossed there on their way home from school were sent round by the bridge. Nobody was alarmed: it
rose every spring when the snow went, and every spring it fell again within a week. Old Martha, who had kept a record
of the height in chalk on the wall of her cellar for thirty-one years, said that it had been higher in eleven of them.

What was different this time was the sound. Water that runs over stones makes a bright, broken noise; this was one low
note, steady as an organ pipe, and it came from somewhere under the embankment. The engineer whom the county sent
listened to it for a long time. He measured 2.4 metres at the gauge, then 2.6 an hour later, wrote both numbers down,
and asked for sandbags.

To sort a list of records by two keys, sort by the second key first and then by the first, because the sort is stable:

def by_name_then_age(records):
    records = sorted(records, key=lambda r: r.age)
    return sorted(records, key=lambda r: r.name)

The same can be written with one key function that returns a tuple. If an exception is raised while a key is computed,
the list is left unchanged. The function returns None for an empty sequence and raises ValueError if the size of the
step is zero or negative.
"""


def evaluation_text(folder: Path, manifest: Manifest) -> Text | None:
    """Up to TOKENS ids for the export in `folder`; None if its tokenizer cannot be read here."""
    if manifest.decoder is None:
        return None
    is_demo = manifest.source.get("id") == "demo"
    text, name = (_held_out(), "the demo's held-out text") if is_demo else (_PAGE, "prose and code")
    length = min(TOKENS, manifest.decoder.context_length)
    found = encoded(folder, manifest, text) or ()
    ids = [token for token in found if token < manifest.sampler.vocab_size][:length]
    return Text(np.asarray(ids, dtype=np.int64), name) if len(ids) > 1 else None


def encoded(folder: Path, manifest: Manifest, text: str) -> list[int] | None:
    """Token ids of `text` by the tokenizer that the manifest of `folder` lists; None where it lists none.

    Raises ManifestError for a tokenizer.json that is no longer what is listed, TokenizerError for one that is none.
    """
    entry = manifest.files.get("tokenizer.json")
    if entry is None:
        return None
    from tokenizers import Tokenizer

    with open_listed(folder, "tokenizer.json", entry) as stream:
        data = stream.read()
    try:
        ids: list[int] = Tokenizer.from_str(data.decode("utf-8")).encode(text).ids
    except Exception as error:  # noqa: BLE001  # the library raises bare Exception
        reason = " ".join(str(error).split())[:200]
        raise TokenizerError(
            f"{folder / 'tokenizer.json'} cannot be read ({reason}); export the model again."
        ) from None
    return ids


def _held_out() -> str:
    from topw_deploy.demo.corpus import gather_corpus

    documents = sorted(gather_corpus().held_out)
    return "\n\n".join(documents[:: max(1, len(documents) // 40)])
