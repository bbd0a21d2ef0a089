"""Arrays in .npy files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from topw_deploy.errors import SourceError


def mapped_array(path: Path, content: str) -> np.ndarray:
    """Memory-map the array in a .npy file. content: what it should hold, for the messages.

    Raises SourceError if the file is missing or no such array.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it is an archive of arrays")
    except FileNotFoundError:
        raise SourceError(f"{path} does not exist; give a .npy file with {content}.") from None
    except (OSError, ValueError, EOFError) as error:
        raise SourceError(f"{path} is not a .npy file of numbers ({error}); save {content} with numpy.save.") from None
    return array
