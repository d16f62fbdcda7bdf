"""An image as docker/check built it."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def image() -> str:
    """Skips where KITH_IMAGE names none."""
    name = os.environ.get("KITH_IMAGE")
    if not name:
        pytest.skip("KITH_IMAGE names no image: make container-check")
    return name
