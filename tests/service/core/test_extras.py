"""An optional package that is missing is named with its extra."""

from __future__ import annotations

import pytest

from service.core import extras
from service.core.errors import ExtraMissingError


def test_a_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(ExtraMissingError, match=r"A backup needs absent_package: pip install 'kith-face\[arrow\]'"):
        extras.require_package("absent_package", "arrow", "A backup")
    extras.require_package("numpy", "arrow", "Nothing")
