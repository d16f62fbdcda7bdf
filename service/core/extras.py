"""Optional packages of the distribution (extras in pyproject.toml)."""

from __future__ import annotations

from importlib.util import find_spec

from service.core.errors import ExtraMissingError


def require_package(package: str, extra: str, purpose: str) -> None:
    """Check that an optional package is installed.

    Raises:
        ExtraMissingError: it is not. The error names the extra to install.
    """
    if find_spec(package) is None:
        raise ExtraMissingError(f"{purpose} needs {package}: pip install '.[{extra}]' in a clone of Kith")
