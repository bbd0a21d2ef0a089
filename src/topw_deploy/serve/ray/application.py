"""Builds the application from the arguments in the config file of `serve run`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from topw_deploy.errors import ParameterError
from topw_deploy.serve.options import ServeOptions
from topw_deploy.serve.ray.gateway import Gateway
from topw_deploy.serve.ray.replica import Replica
from topw_deploy.serve.ray.router import PrefixRouter

_MOST_CALLS = 1024  # one gateway passes on at most this many at once
_FIELDS = {each.name for each in dataclasses.fields(ServeOptions)}


def build(arguments: Mapping[str, Any]) -> Application:
    """Build the application: the deployments "Gateway" and "Replica", whose options the config file can set.

    arguments: fields of `topw_deploy.serve.options.ServeOptions`; `models` maps names to absolute paths, which every
        machine must have. Two further arguments:
        prefix_characters (256): number of a prompt's first characters that choose its replica; with 0, prompts choose
        no replica.
        load_factor (1.25): a replica with more than this many times the mean number of requests is not chosen.

    A replica accepts twice as many requests as it has rows. At most `max_queue` further requests wait in the gateway.

    Raises ParameterError for an invalid argument.
    """
    given = dict(arguments)
    characters, factor = given.pop("prefix_characters", 256), given.pop("load_factor", 1.25)
    _check_routing(characters, factor)
    unknown = given.keys() - _FIELDS
    if unknown:
        raise ParameterError(f"unknown argument {min(unknown)!r}; known are {', '.join(sorted(_FIELDS))}.")
    options = ServeOptions(**{**given, "models": _read_folders(given.get("models")), **_lists_as_tuples(given)})
    rows, queue = int(options.engine.get("max_batch", 8)), int(options.engine.get("max_queue", 256))
    router = RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs={"load_factor": factor})
    replicas = serve.deployment(Replica, name="Replica").options(
        max_ongoing_requests=2 * rows,
        max_queued_requests=queue,
        graceful_shutdown_timeout_s=options.drain_timeout,
        request_router_config=router,
    )
    gateway = serve.deployment(Gateway, name="Gateway").options(
        max_ongoing_requests=_MOST_CALLS, graceful_shutdown_timeout_s=options.drain_timeout
    )
    return gateway.bind(replicas.bind(options), options, characters)


def _check_routing(characters: Any, factor: Any) -> None:
    if isinstance(characters, bool) or not isinstance(characters, int) or characters < 0:
        raise ParameterError(f"prefix_characters is {characters!r}, but must be an integer >= 0.", "prefix_characters")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 <= factor < float("inf"):
        raise ParameterError(f"load_factor is {factor!r}, but must be a finite number >= 1.", "load_factor")


def _read_folders(models: Any) -> dict[str, Path]:
    """Check `models`. The paths must be absolute, because each replica runs in a working directory of its own."""
    if not isinstance(models, Mapping):
        raise ParameterError("models is missing; give the path of an exported folder for each name.", "models")
    found = {str(name): Path(folder) for name, folder in models.items()}
    relative = next((folder for folder in found.values() if not folder.is_absolute()), None)
    if relative is not None:
        raise ParameterError(f"models has the path {relative}, but must have absolute ones.", "models")
    return found


def _lists_as_tuples(given: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The options that are lists in YAML, as tuples."""
    return {name: tuple(given[name]) for name in ("api_keys", "cors_origins") if name in given}
