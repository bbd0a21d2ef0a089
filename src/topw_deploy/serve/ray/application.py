"""`build`: the application from the arguments in `serve run`'s config file."""

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

_CALLS = 1024  # that one gateway passes on at once
_FIELDS = {each.name for each in dataclasses.fields(ServeOptions)}


def build(arguments: Mapping[str, Any]) -> Application:
    """The application: a deployment "Gateway" and a deployment "Replica", whose options the config file can set.

    arguments: fields of `topw_deploy.serve.options.ServeOptions`; `models` maps names to absolute paths, which every
        machine must have. In addition
        prefix_characters (256): number of a prompt's first characters that choose its replica; 0 switches this off.
        load_factor (1.25): a replica with more than this many times the mean number of requests is not chosen.

    A replica takes twice as many requests as it has rows; more wait in the gateway, at most `max_queue`.

    Raises ParameterError for an invalid argument.
    """
    given = dict(arguments)
    characters, factor = given.pop("prefix_characters", 256), given.pop("load_factor", 1.25)
    _check(characters, factor)
    unknown = given.keys() - _FIELDS
    if unknown:
        raise ParameterError(f"unknown argument {min(unknown)!r}; known are {', '.join(sorted(_FIELDS))}.")
    options = ServeOptions(**{**given, "models": _folders(given.get("models")), **_tuples(given)})
    rows, queue = int(options.engine.get("max_batch", 8)), int(options.engine.get("max_queue", 256))
    router = RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs={"load_factor": factor})
    replicas = serve.deployment(Replica, name="Replica").options(
        max_ongoing_requests=2 * rows,
        max_queued_requests=queue,
        graceful_shutdown_timeout_s=options.drain_timeout,
        request_router_config=router,
    )
    gateway = serve.deployment(Gateway, name="Gateway").options(
        max_ongoing_requests=_CALLS, graceful_shutdown_timeout_s=options.drain_timeout
    )
    return gateway.bind(replicas.bind(options), options, characters)


def _check(characters: Any, factor: Any) -> None:
    if isinstance(characters, bool) or not isinstance(characters, int) or characters < 0:
        raise ParameterError(f"prefix_characters is {characters!r}, but must be an integer >= 0.", "prefix_characters")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 <= factor < float("inf"):
        raise ParameterError(f"load_factor is {factor!r}, but must be a finite number >= 1.", "load_factor")


def _folders(models: Any) -> dict[str, Path]:
    """Replicas run in working directories of their own, hence absolute paths."""
    if not isinstance(models, Mapping):
        raise ParameterError("models is missing; give the path of an exported folder for each name.", "models")
    found = {str(name): Path(folder) for name, folder in models.items()}
    relative = next((folder for folder in found.values() if not folder.is_absolute()), None)
    if relative is not None:
        raise ParameterError(f"models has the path {relative}, but must have absolute ones.", "models")
    return found


def _tuples(given: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """YAML's lists."""
    return {name: tuple(given[name]) for name in ("api_keys", "cors_origins") if name in given}
