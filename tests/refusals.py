"""Errors by code."""

from __future__ import annotations

import pytest

from service.core.errors import KithError


def raises_code(*codes: str, match: str | None = None) -> pytest.RaisesExc[KithError]:
    """Expect an error of one of these codes; as ``pytest.raises``."""
    return pytest.RaisesExc(KithError, match=match, check=lambda error: error.code in codes)
