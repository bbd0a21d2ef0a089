"""`topw verify OUT`: check an exported folder again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from topw_deploy import install
from topw_deploy.cli.options import CONTEXT
from topw_deploy.cli.terminal import say, say_json, tell
from topw_deploy.errors import MissingPackageError
from topw_deploy.progress import Progress
from topw_deploy.text import count_text


@click.command(name="verify", context_settings=CONTEXT)
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--source", default=None, metavar="MODEL", help="Model to compare with.  [default: the manifest's source]"
)
@click.option("--hashes-only", is_flag=True, help="Compare the files with the manifest and run nothing.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the source.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(out: Path, source: str | None, hashes_only: bool, trust_remote_code: bool, as_json: bool) -> None:
    """Compare the files of OUT with its manifest, and its graph with the model it was exported from.

    A check that cannot run here (no torch, the source is gone) is listed with the reason and does not fail.
    """
    from topw_deploy.errors import ManifestError, TopWError
    from topw_deploy.manifest import check_hashes, load_manifest

    try:
        manifest = load_manifest(out)
        if manifest.verification.status == "provisional":
            raise ManifestError(f"{out} is an export whose verification did not finish; export the model again.")
        check_hashes(out, manifest)
        tell(f"  -[✓] {len(manifest.files)} files have the manifest's sizes and SHA-256")
        result: dict[str, Any] = {
            "folder": str(out),
            "files": len(manifest.files),
            "checks": [],
            "skipped": [],
            "notes": [],
        }
        if not hashes_only:
            result |= _check_graph(out, manifest, source, trust_remote_code)
    except TopWError as error:
        raise click.ClickException(str(error)) from error
    failed = [check["name"] for check in result["checks"] if not check["passed"]]
    if as_json:
        say_json(result, indent=2)
    elif not failed:
        passed = count_text(len(result["checks"]), "check")
        say(f"{out} is intact; {passed} passed, {len(result['skipped'])} not compared")
    if failed:
        raise click.ClickException(
            f"{count_text(len(failed), 'check')} failed (first: {failed[0]}); export the model again."
        )


def _check_graph(out: Path, manifest: Any, source: str | None, trust_remote_code: bool) -> dict[str, Any]:
    try:
        install.require("it", "export")
        from topw_deploy.export.verification.run import recheck
    except MissingPackageError as error:
        reason = str(error)
        tell(f"  -[-] the graph: not compared, {reason}")
        return {"skipped": [("graph", reason)]}
    outcome = recheck(out, manifest, source, trust_remote_code, Progress(tell))
    return {
        "checks": msgspec.to_builtins(outcome.checks),
        "skipped": [(each.name, each.reason) for each in outcome.not_compared],
        "notes": msgspec.to_builtins(outcome.notes),
    }
