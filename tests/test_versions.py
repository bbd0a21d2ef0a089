"""Versions are compared as numbers."""

from __future__ import annotations

import pytest

from topw_deploy.versions import installed_version, library_versions, major_minor


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("1.9", (1, 9)), ("1.31.1", (1, 31)), ("10.13.3.9", (10, 13)), ("1.24.0.dev20260101", (1, 24)), ("", ())],
)
def test_a_release_is_its_major_and_minor_number(version: str, numbers: tuple[int, ...]) -> None:
    assert major_minor(version) == numbers


def test_only_installed_distributions_have_versions() -> None:
    assert installed_version("no-such-distribution") is None
    assert library_versions()["numpy"] == installed_version("numpy")
