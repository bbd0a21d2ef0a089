"""Makes docs/images/page.png: the page of `topw serve` with SmolLM2-135M-Instruct.

Needs `make demo`, `make browser`, and Pillow, which matplotlib brings.

Run it in a clone: .venv/bin/python docs/images/page.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.browser import run_node  # noqa: E402

PICTURE = Path(__file__).with_suffix(".png")
COLOURS = 224


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        out = str(Path(place) / "demo")
        topw = [sys.executable, "-m", "topw_deploy"]
        subprocess.run([*topw, "export", "smollm2", out, "--with-logits", "--no-verify", "--quiet"], check=True)
        server = subprocess.Popen([*topw, "serve", out, "--port", "0"], stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            address = next(json.loads(line)["address"] for line in server.stderr if '"address"' in line)
            next(line for line in server.stderr if '"opened"' in line)
            run_node(Path(__file__).with_suffix(".mjs"), address, str(PICTURE))
        finally:
            server.terminate()
            server.wait()
    with Image.open(PICTURE) as whole:  # flat colours: a palette is as good, and a third of the size
        small = whole.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
