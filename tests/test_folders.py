"""A staged_folder folder appears whole, and replaces another one only on request."""

from __future__ import annotations

from pathlib import Path

import pytest

from topw_deploy import folders
from topw_deploy.folders import staged_folder


def test_a_folder_that_appeared_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    output = tmp_path / "out"

    def write() -> None:
        with staged_folder(output) as made:
            (made / "file").touch()
            output.mkdir()
            (output / "other").touch()

    with pytest.raises(OSError, match="not empty"):
        write()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "other"]


@pytest.mark.parametrize("in_one_step", [True, False])
def test_a_folder_is_replaced_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_one_step: bool) -> None:
    if not in_one_step:
        monkeypatch.setattr(folders, "exchange", lambda *_: False)
    output = tmp_path / "out"
    output.mkdir()
    (output / "old").touch()
    with staged_folder(output, replace=True) as made:
        (made / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "new"]


def test_the_hidden_folder_may_be_elsewhere(tmp_path: Path) -> None:
    place, output = tmp_path / "place", tmp_path / "place" / "inner" / "out"
    output.parent.mkdir(parents=True)
    with staged_folder(output, place=place) as made:
        assert made.parent.parent == place
    assert [path.name for path in place.rglob("*")] == ["inner", "out"]
