"""Makes docs/images/page.png and web.png: the pages of `topw serve` and `topw web` with SmolLM2-135M-Instruct.

Needs `make demo`, `make browser`, and Pillow, which matplotlib brings.

Run it in a clone: .venv/bin/python docs/images/page.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.browser import FOLDER, run_node  # noqa: E402

SCRIPT = Path(__file__).with_suffix(".mjs")
NAME = "SmolLM2-135M-Instruct"
TOPW = [sys.executable, "-m", "topw_deploy"]
COLOURS = 224


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        for form, options in (("page", ["--with-logits"]), ("web", ["--dtype", "fp32"])):
            out = str(Path(place) / form)
            subprocess.run([*TOPW, "export", "smollm2", out, *options, "--no-verify", "--quiet"], check=True)
        take_page(f"{place}/page")
        take_web(f"{place}/web", f"{place}/site")


def take_page(out: str) -> None:
    command = [*TOPW, "serve", out, "--port", "0", "--served-model-name", NAME]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        address = next(json.loads(line)["address"] for line in server.stderr if '"address"' in line)
        next(line for line in server.stderr if '"opened"' in line)
        take(address, "page.png")
    finally:
        server.terminate()
        server.wait()


def take_web(out: str, site: str) -> None:
    runtime = str(FOLDER / "node_modules")
    subprocess.run([*TOPW, "web", out, site, "--runtime", runtime, "--title", NAME], check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        take(f"http://127.0.0.1:{server.server_port}", "web.png")
        server.shutdown()


def take(address: str, name: str) -> None:
    picture = SCRIPT.with_name(name)
    run_node(SCRIPT, address, str(picture))
    with Image.open(picture) as whole:  # flat colours: a palette is as good, and a third of the size
        small = whole.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(picture, optimize=True)


if __name__ == "__main__":
    main()
