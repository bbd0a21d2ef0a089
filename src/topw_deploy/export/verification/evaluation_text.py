"""Text that a quantised decoder is measured on: the demo model's own held-out documents, a page of prose for others."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from topw_deploy.export.verification.quantised_checks import TOKENS, Text
from topw_deploy.manifest import Manifest

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
    file = folder / "tokenizer.json"
    if not file.is_file() or manifest.decoder is None:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    is_demo = manifest.source.get("id") == "demo"
    text, name = (_held_out(), "the demo's held-out text") if is_demo else (_PAGE, "prose and code")
    length = min(TOKENS, manifest.decoder.context_length)
    ids = [token for token in tokenizer.encode(text).ids if token < manifest.sampler.vocab_size][:length]
    return Text(np.asarray(ids, dtype=np.int64), name) if len(ids) > 1 else None


def _held_out() -> str:
    from topw_deploy.demo.corpus import gather_corpus

    documents = sorted(gather_corpus().held_out)
    return "\n\n".join(documents[:: max(1, len(documents) // 40)])
