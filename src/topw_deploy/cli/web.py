"""`topw web`: write a static site that runs an exported model in the browser."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from topw_deploy.cli.options import CONTEXT
from topw_deploy.cli.terminal import say, say_json, tell
from topw_deploy.text import decimal_size
from topw_deploy.web import write_site


@click.command(name="web", context_settings=CONTEXT)
@click.argument("model", metavar="OUT", type=click.Path(path_type=Path))
@click.argument("output", metavar="SITE", type=click.Path(path_type=Path))
@click.option(
    "--runtime",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A node_modules with onnxruntime-web and @huggingface/tokenizers, to copy into SITE. "
    "[default: the page loads them from cdn.jsdelivr.net and checks their hashes]",
)
@click.option("--title", help="Title of the page.  [default: the model's name]")
@click.option("--prompt", default="", help="Text in the page's field for the prompt.")
@click.option("--overwrite", "--force", is_flag=True, help="Replace an earlier site in SITE at the very end.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON report.")
def command(
    model: Path, output: Path, runtime: Path | None, title: str | None, prompt: str, overwrite: bool, as_json: bool
) -> None:
    """Write the folder SITE: a page that runs the exported folder OUT in the browser, without a server.

    onnxruntime-web runs the graph on the CPU, and the function in the file is the sampler. The same seed gives the
    tokens that Python draws, except where rounding decides.
    """
    site = write_site(model, output, runtime=runtime, title=title, prompt=prompt, overwrite=overwrite)
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
