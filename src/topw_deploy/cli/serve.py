"""`topw serve`: serve exported models over HTTP, with the endpoints of OpenAI's API."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from topw_deploy.cli.options import (
    CONTEXT,
    COUNT,
    FILE,
    PATH,
    SIZE,
    draft_model_option,
    force_option,
    json_option,
    opening_options,
    option_group,
    take_given,
    take_opening,
)
from topw_deploy.cli.terminal import say, say_json, tell, waiting, write_stderr
from topw_deploy.sampling.parameters import known_clause
from topw_deploy.text import count_text, decimal_size
from topw_deploy.web import write_site

_engine_options = option_group(
    click.option("--max-batch", type=COUNT, default=8, help="Maximum number of sequences that run at once, per model."),
    click.option(
        "--max-queue",
        type=click.IntRange(min=0),
        default=256,
        help="Maximum number of sequences that wait, per model; `topw serve` answers more with 429.",
    ),
    click.option(
        "--max-length",
        type=COUNT,
        help="Maximum tokens of a sequence, including its prompt.  [default: the model's context]",
    ),
)
_ENGINE_NAMES = ("max_batch", "max_queue", "max_length")
_SERVE_ENGINE_NAMES = (*_ENGINE_NAMES, "kv_bytes", "prefill_budget", "reuse_prefixes", "prefix_bytes")
_SERVER_NAMES = ("host", "port", "uds", "max_connections", "verbose")


def _read_config(ctx: click.Context, _option: click.Parameter, file: Path | None) -> None:
    """Take the options of a TOML file as defaults. Raises BadParameter if it cannot be read or has another name."""
    if file is None:
        return
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # errors of TOML and UTF-8 are ValueErrors
        raise click.BadParameter(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    options = {flag[2:]: each for each in ctx.command.params for flag in each.opts if flag.startswith("--")}
    ctx.default_map = {}
    for key, value in found.items():
        option = options.get(key.replace("_", "-"))
        if option is None:
            raise click.BadParameter(f"{file} has the unknown option {key!r}: {known_clause(key, sorted(options))}.")
        is_single = isinstance(option, click.Option) and option.multiple and not isinstance(value, list)
        ctx.default_map[str(option.name)] = [value] if is_single else value


@click.command(name="serve", context_settings=CONTEXT)
@click.argument("folders", metavar="MODEL...", nargs=-1, type=PATH)
@click.option("-m", "--model", metavar="MODEL", multiple=True, type=PATH, help="MODEL, given as an option. Repeatable.")
@click.option(
    "--config",
    type=FILE,
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="TOML file with options that are not given, such as max-batch = 4.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port to listen on; 0: any free one.")
@click.option("--uds", type=PATH, help="Listen on this Unix socket instead; only its owner can connect.")
@click.option(
    "--served-model-name",
    metavar="NAME",
    multiple=True,
    help="Name of a model in requests, one per MODEL.  [default: the folder's name]",
)
@click.option("--api-key", metavar="KEY", multiple=True, help="Accept only requests with this key. Repeatable.")
@click.option(
    "--cors-origin", metavar="URL", multiple=True, help="Allow calls from web pages of this origin. Repeatable."
)
@_engine_options
@click.option(
    "--kv-bytes", type=SIZE, help="Maximum memory of each cache, such as 2GB; lowers --max-batch if necessary."
)
@click.option("--prefill-budget", type=COUNT, default=256, help="Maximum prompt tokens per iteration.")
@click.option("--prefix-bytes", type=SIZE, help="Host memory to keep earlier prompts for reuse.  [default: none]")
@click.option(
    "--reuse-prefixes/--no-reuse-prefixes", default=True, help="Read the common beginning of prompts only once."
)
@click.option("--max-body", type=SIZE, default="8MB", help="Maximum size of a request's body; larger ones get 413.")
@click.option("--body-timeout", type=float, default=30.0, help="Seconds in which a request's body must arrive.")
@click.option(
    "--request-timeout",
    type=float,
    default=600.0,
    help="Maximum seconds of a generation, including the wait in the queue.",
)
@click.option("--max-connections", type=COUNT, default=1024, help="Maximum number of connections; more get 503.")
@click.option(
    "--ping-interval", type=float, default=15.0, help="Seconds between comments that keep a stream's connection open."
)
@click.option(
    "--drain-timeout", type=float, default=30.0, help="Seconds in which running requests may finish after SIGTERM."
)
@click.option("--tool-parser", metavar="FAMILY", help="Family of tool calls.  [default: that of the chat template]")
@click.option("--page/--no-page", default=True, help="Serve a page at / to try the models.")
@opening_options
@draft_model_option
@click.option("--log-prompts", is_flag=True, help="Write prompts and answers to the log.")
@click.option(
    "--log-format",
    type=click.Choice(("json", "text")),
    help="Format of the log.  [default: text on a terminal, else json]",
)
@click.option("-v", "--verbose", is_flag=True, help="Also log GET requests.")
def serve(
    folders: tuple[Path, ...],
    model: tuple[Path, ...],
    served_model_name: tuple[str, ...],
    log_format: str | None,
    **options: Any,
) -> None:
    """Serve exported models over HTTP, with the endpoints of OpenAI's API.

    A request names one of the models in the folders MODEL. Logs go to stderr, without prompts. After SIGTERM, running
    requests are finished. See docs/guide/serve.md.
    """
    from topw_deploy import install

    if not (folders := (*model, *folders)):
        raise click.UsageError("Missing argument 'MODEL...'.")
    install.require("serving", "serve")
    from topw_deploy.serve.server import run
    from topw_deploy.serve.service import ServeOptions

    server_options = {name: options.pop(name) for name in _SERVER_NAMES}
    serve_options = ServeOptions(
        models=_models_by_name(folders, served_model_name),
        api_keys=options.pop("api_key"),
        cors_origins=options.pop("cors_origin"),
        opening={**take_opening(options), "draft_model": options.pop("draft_model")},
        engine=take_given(options, _SERVE_ENGINE_NAMES),
        **options,
    )
    log_format = log_format or ("text" if sys.stderr.isatty() else "json")
    loading = waiting(f"Opening {count_text(len(folders), 'model')}")
    run(serve_options, json_logs=log_format == "json", write_log=write_stderr, loading=loading, **server_options)


def _models_by_name(folders: tuple[Path, ...], names: tuple[str, ...]) -> dict[str, Path]:
    """The folders by the names of their models. Raises UsageError unless each model has a name of its own."""
    if names and len(names) != len(folders):
        models = count_text(len(folders), "model")
        raise click.UsageError(f"--served-model-name is given {count_text(len(names), 'time')} for {models}.")
    model_names = names or tuple(folder.resolve().name for folder in folders)
    if len(set(model_names)) < len(model_names):
        twice = next(name for name in model_names if model_names.count(name) > 1)
        raise click.UsageError(f"two models are named {twice!r}; give each a name of its own with --served-model-name.")
    return dict(zip(model_names, folders, strict=True))


@click.command(name="triton", context_settings=CONTEXT)
@click.argument("folder", metavar="MODEL", type=PATH)
@click.argument("repository", metavar="REPOSITORY", type=PATH)
@click.option("--name", help="Name of the model in Triton.  [default: the folder's name]")
@_engine_options
@opening_options
@click.option("--hard-link", is_flag=True, help="Hard-link the export's files instead of copying them.")
def triton(folder: Path, repository: Path, name: str | None, hard_link: bool, **options: Any) -> None:
    """Add the exported model in the folder MODEL to a model REPOSITORY of NVIDIA's Triton Inference Server.

    The model runs in an engine in Triton's Python backend and streams its text. See docs/guide/scale.md.
    """
    from topw_deploy.triton.repository import write_repository

    engine, opening = take_given(options, _ENGINE_NAMES), take_opening(options)
    opening = {keyword: value for keyword, value in opening.items() if value is not None}
    say(write_repository(folder, repository, name=name, engine=engine, opening=opening, hard_link=hard_link))


@click.command(name="web", context_settings=CONTEXT)
@click.argument("model", metavar="MODEL", type=PATH)
@click.argument("output", metavar="SITE", type=PATH)
@click.option(
    "--runtime",
    type=PATH,
    metavar="DIR",
    help="A node_modules with onnxruntime-web and @huggingface/tokenizers, to copy into SITE. "
    "[default: the page loads them from cdn.jsdelivr.net and checks their hashes]",
)
@click.option("--title", help="Title of the page.  [default: the model's name]")
@click.option("--prompt", default="The sea is", help="Text in the page's field for the prompt.")
@force_option
@json_option
def web(model: Path, output: Path, as_json: bool, **options: Any) -> None:
    """Write the folder SITE: a page that runs the exported folder MODEL in the browser, without a server.

    onnxruntime-web runs the graph on the CPU, and the function in the file is the sampler. The same seed gives the
    tokens that Python draws, except where rounding decides.
    """
    site = write_site(model, output, **options)
    for note in site.notes:
        tell(f"Note: {note}")
    if as_json:
        say_json({**asdict(site), "folder": str(site.folder)}, indent=2)
        return
    say(site.folder)
    libraries = "libraries from cdn.jsdelivr.net" if site.outside else "everything included"
    tell(
        f"{decimal_size(site.bytes)}, including {decimal_size(site.model_bytes)} for the graph; {libraries}.",
        f"To try it: python -m http.server -d {site.folder}",
        "It uses one thread, or up to four if the server sends Cross-Origin-Opener-Policy: same-origin and "
        "Cross-Origin-Embedder-Policy: require-corp.",
    )
