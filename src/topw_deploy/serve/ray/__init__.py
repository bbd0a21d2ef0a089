"""The server as a Ray Serve application: a gateway and replicas on any number of machines. Needs the extra [ray].

deployments: the gateway, the replicas and the router.

Here is the choice of a replica for a prompt: the one that has read the prompt's beginning, unless its load is too high.

Rendezvous hashing (Thaler and Ravishankar 1998) orders the replicas for each beginning. If a replica is added or
removed, only beginnings that move to or from this replica get another first choice. The bound on the load is that of
consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018): no replica gets more than `factor`
times the mean number of requests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def build(arguments: Mapping[str, Any]) -> Application:
    """Build the application: the deployments "Gateway" and "Replica", whose options the config file can set.

    arguments: fields of `topw_deploy.serve.service.ServeOptions`; `models` maps names to absolute paths, which every
        machine must have. Two further arguments:
        prefix_characters (256): number of a prompt's first characters that choose its replica; with 0, prompts choose
        no replica.
        load_factor (1.25): a replica with more than this many times the mean number of requests is not chosen.

    A replica accepts twice as many requests as it has slots. At most `max_queue` further requests wait in the gateway.

    Raises ParameterError for an invalid argument.
    """
    from topw_deploy.serve.ray.deployments import build_application

    return build_application(dict(arguments))


_PROMPTS = ("prompt", "messages", "input")


def prefix_key(body: bytes, characters: int) -> str:
    """The model and the first `characters` characters of the prompt; "" for a request without a prompt.

    body: the request's JSON.

    Of a chat, the characters are those of its messages as JSON, so a system prompt comes first.
    """
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(fields, dict):
        return ""
    prompt = next((fields[name] for name in _PROMPTS if fields.get(name)), None)
    if prompt is None or characters < 1:
        return ""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
    return f"{fields.get('model') or ''}\n{text[:characters]}"


@lru_cache(maxsize=4096)
def order_replicas(key: str, replicas: tuple[str, ...]) -> tuple[int, ...]:
    """Indices of the replicas in the order in which they are tried for `key`."""
    weights = [blake2b(f"{replica}\n{key}".encode("utf-8", "replace"), digest_size=8).digest() for replica in replicas]
    return tuple(sorted(range(len(replicas)), key=lambda index: weights[index], reverse=True))


def choose_replica(order: Sequence[int], loads: Sequence[int], factor: float) -> int:
    """The first replica of `order` that may take one more request.

    loads: number of requests that each replica has.
    factor: >= 1; the bound is ceil(factor * mean), where the mean includes the new request.
    """
    bound = math.ceil(factor * (sum(loads) + 1) / len(loads))
    return next(index for index in order if loads[index] < bound)
