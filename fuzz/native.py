"""Fuzz the native sampler under AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m fuzz.native [--seconds 600] [--seed 0] [--compiler clang++] [--corpus FOLDER]

With Clang, libFuzzer guides the inputs by coverage; with other compilers they are random bytes.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from topw_deploy.plugins.compile_native import SOURCES, NotBuiltError

HARNESS = Path(__file__).with_name("native_rows.cpp")
FLAGS = ("-std=c++17", "-O1", "-g", "-fno-rtti", "-ffp-contract=off", "-fno-omit-frame-pointer", "-pthread")
SANITIZERS = "address,undefined"


def build(output: Path, compiler: str, libfuzzer: bool) -> None:
    """Compile the harness and the sampler into `output`. Raises NotBuiltError if the compiler fails.

    libfuzzer: whether libFuzzer drives the harness, instead of its own main function.
    """
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    kind = [f"-fsanitize={SANITIZERS},fuzzer"] if libfuzzer else [f"-fsanitize={SANITIZERS}", "-DTOPW_FUZZ_MAIN"]
    command = [compiler, *FLAGS, *kind, "-fno-sanitize-recover=all", f"-I{SOURCES}", *sources, str(HARNESS)]
    done = subprocess.run([*command, "-lm", "-o", str(output)], capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if "error" in line or "cannot find" in line]
        raise NotBuiltError(f"{compiler} failed ({(words or ['no message'])[0].strip()[:200]})")


def build_any(folder: Path, compiler: str | None) -> tuple[Path, bool]:
    """Compile the harness with the first compiler that can. Returns the program, and whether libFuzzer drives it.

    compiler: the only one to try; None for several. Raises NotBuiltError if all fail.
    """
    reasons = []
    for name in [compiler] if compiler else ["clang++", "g++", "c++"]:
        if shutil.which(name) is None:
            reasons.append(f"no {name}")
            continue
        for libfuzzer in (True, False):
            try:
                build(folder / "native_rows", name, libfuzzer)
            except NotBuiltError as reason:
                reasons.append(str(reason))
            else:
                return folder / "native_rows", libfuzzer
    raise NotBuiltError("; ".join(reasons))


def command(program: Path, libfuzzer: bool, seconds: int, seed: int, corpus: Path) -> list[str]:
    """The command that runs the harness for `seconds`. corpus: libFuzzer's folder of inputs."""
    if not libfuzzer:
        return [str(program), str(seconds), str(seed)]
    limits = [f"-max_total_time={seconds}", f"-seed={seed + 1}", "-max_len=2000", "-len_control=0", "-timeout=120"]
    return [
        str(program),
        str(corpus),
        *limits,
        "-rss_limit_mb=6000",
        "-print_final_stats=1",
        f"-artifact_prefix={corpus}/",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiler")
    parser.add_argument("--corpus", type=Path, help="a folder that keeps inputs between runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="topw-fuzz-") as scratch:
        corpus = given.corpus or Path(scratch) / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        program, libfuzzer = build_any(Path(scratch), given.compiler)
        return subprocess.run(command(program, libfuzzer, given.seconds, given.seed, corpus)).returncode


if __name__ == "__main__":
    sys.exit(main())
