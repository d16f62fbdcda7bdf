"""Validated reading of fields from untrusted JSON and TOML documents.

Every function takes the dotted ``name`` of the field and raises PackError with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from models.errors import PackError

MAX_NUMBER: Final = 1e6

_SAFE_PATH = re.compile(r"[A-Za-z0-9_.-][A-Za-z0-9_./ -]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def read_text(document: Mapping[str, Any], key: str, name: str) -> str:
    """Return a required, non-empty string."""
    value = document.get(key)
    if not isinstance(value, str) or not value.strip():
        raise PackError(name, "is required and must be a non-empty string")
    return value.strip()


def read_object(document: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """Return a required object."""
    value = document.get(key)
    if not isinstance(value, dict):
        raise PackError(name, "is required and must be an object")
    return value


def read_optional_object(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object, empty if the key is missing."""
    return read_object(document, key, key) if key in document else {}


def read_sha256(document: Mapping[str, Any], key: str, name: str) -> str | None:
    """Return an optional SHA-256 checksum."""
    value = document.get(key)
    if value is not None and not (isinstance(value, str) and _SHA256.fullmatch(value)):
        raise PackError(name, "must be 64 lower-case hexadecimal digits")
    return value


def read_number(value: Any, name: str) -> float:
    """Return a finite number with an absolute value of at most MAX_NUMBER."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise PackError(name, "must be a finite number")
    return float(value)


def read_share(value: Any, name: str) -> float:
    """Return a number in [0, 1]."""
    if not 0 <= (share := read_number(value, name)) <= 1:
        raise PackError(name, "must be between 0 and 1")
    return share


def read_positive_int(value: Any, name: str, maximum: int) -> int:
    """Return an integer in [1, maximum]."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= maximum:
        raise PackError(name, f"must be a positive integer of at most {maximum}")
    return value


def read_file(directory: Path, value: Any, name: str, suffix: str) -> Path:
    """Return the path of an existing file; symbolic links that lead out of ``directory`` are rejected."""
    if not isinstance(value, str) or not value.strip():
        raise PackError(name, "is required and must be a file name")
    if not _SAFE_PATH.fullmatch(value) or ".." in PurePosixPath(value).parts:
        raise PackError(name, f"{value!r} must be a plain relative path inside the pack")
    path = (directory / value).resolve()
    if not path.is_relative_to(directory):
        raise PackError(name, f"{value!r} must be inside the pack")
    if path.suffix.lower() != suffix:
        raise PackError(name, f"{value!r} must end in {suffix}")
    if not path.is_file():
        raise PackError(name, f"{value!r} does not exist in the pack")
    return path
