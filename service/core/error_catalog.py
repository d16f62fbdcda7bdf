"""All errors with a code, for metrics and documentation."""

from __future__ import annotations

import service.core.photo_errors  # noqa: F401 - defines the errors of photos
from service.core.errors import KithError


def all_errors() -> list[type[KithError]]:
    """Return every error class that defines a code, sorted by code."""
    found: list[type[KithError]] = []
    waiting: list[type[KithError]] = [KithError]
    while waiting:
        error = waiting.pop()
        waiting += error.__subclasses__()
        if "code" in vars(error):
            found.append(error)
    return sorted(found, key=lambda e: e.code)
