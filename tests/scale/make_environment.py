"""Make Ray's environment: `python -m tests.scale.make_environment .venv-ray [option of pip ...]`.

It has Ray and what Ray needs. Packages that the Python that runs this program has already, and this package, are taken
from there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

# Compiles the modules of Ray's own processes, because a node ends if they have not started within 30 seconds.
_COMPILE = """
import ray._private.runtime_env.agent.main, ray.dashboard.agent, ray.serve.scripts
from ray.dashboard.utils import DashboardAgentModule, get_all_modules
get_all_modules(DashboardAgentModule)
"""


def make(folder: Path, pip_options: list[str]) -> None:
    """Raises CalledProcessError if pip fails."""
    venv.create(folder, clear=True, symlinks=True)
    python = folder / "bin" / "python"
    shared = sysconfig.get_path("purelib")
    own = next(folder.glob("lib/python3.*/site-packages"))
    # addsitedir also reads the folder's .pth files, such as that of an editable installation.
    (own / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n", "utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-compile", *pip_options, "topw-deploy[ray]"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([str(python), "-c", _COMPILE], env=environment, check=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2:])
