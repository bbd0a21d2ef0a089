"""What the commands share that compare kernels with the reference: arguments, the emulated kernel and the exit code."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common import machine
from tests.support.emulated import EmulatedKernel, built


def arguments(description: str | None, rows: int) -> argparse.Namespace:
    """Parse the arguments --rows and --seed. rows: the default number of rows."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=rows)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


@contextmanager
def emulated(rows: int) -> Iterator[tuple[EmulatedKernel, Callable[[int], object]]]:
    """Print the machine and show a progress bar of `rows` rows.

    Yields an emulated kernel, and a function that adds rows to the bar.
    """
    from tqdm import tqdm

    print(machine() + "\n")
    with tempfile.TemporaryDirectory() as folder, tqdm(total=rows, unit="row", mininterval=1.0) as bar:
        yield EmulatedKernel(built(Path(folder))), bar.update


def exit_code(differences: Sequence[str]) -> int:
    """Print the first differences. Returns the exit code, 1 if there are any."""
    for line in differences[:20]:
        print(line)
    return 1 if differences else 0
