"""Errors by code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from kith import KithClientError
from service.core.errors import KithError


def raises_code(*codes: str, match: str | None = None) -> pytest.RaisesExc[KithError]:
    """Expect an error of one of these codes; as ``pytest.raises``."""
    return pytest.RaisesExc(KithError, match=match, check=lambda error: error.code in codes)


def refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> tuple[int, str]:
    """Return status and code with which the service refuses a call of the client."""
    with pytest.raises(KithClientError) as refused:
        call(*arguments, **options)
    return refused.value.status, refused.value.code


def check(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Check that a response is a problem document of this code with a remedy, and return it."""
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert (response.status_code, document["code"], document["status"]) == (status, code, status), document
    assert document["remedy"]
    assert document["title"]
    assert "Traceback" not in response.text
    return document
