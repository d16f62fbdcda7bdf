"""Container image as docker/check built it."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def image() -> str:
    """Return the image name. Skips if KITH_IMAGE is not set."""
    name = os.environ.get("KITH_IMAGE")
    if not name:
        pytest.skip("KITH_IMAGE names no image: make container-check")
    return name
