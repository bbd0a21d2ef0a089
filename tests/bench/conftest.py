from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from topw_deploy.cli.main import topw


@pytest.fixture
def worker_file(tmp_path: Path) -> Path:
    """The file of a worker, for Worker."""
    path = tmp_path / "worker_file.py"
    path.write_text(
        "import os, sys\n"
        "def start(settings):\n"
        "    print('starting', settings['name'])\n"
        "    os.write(1, b'C++ writes on descriptor 1\\n')\n"
        "    def fail(): raise ValueError('two\\nlines')\n"
        "    def refuse():\n"
        "        from topw_deploy.errors import ParameterError\n"
        "        raise ParameterError('lam is -1.')\n"
        "    def die(code):\n"
        "        print('some detail', file=sys.stderr)\n"
        "        print('out of luck', file=sys.stderr, flush=True)\n"
        "        os._exit(code)\n"
        "    return {'add': lambda a, b: a + b, 'fail': fail, 'refuse': refuse, 'die': die,\n"
        "            'threads': lambda: os.environ['OMP_NUM_THREADS'], 'path': lambda: sys.path}\n",
        encoding="utf-8",
    )
    return path


@pytest.fixture
def bench() -> Callable[..., Result]:
    """Runs `topw bench`."""

    def run(*arguments: object) -> Result:
        extra: dict[str, Any] = {"auto_envvar_prefix": "TOPW"}
        return CliRunner().invoke(topw, ["bench", *map(str, arguments)], **extra)

    return run
