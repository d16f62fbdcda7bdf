"""What InsightFace's own library says of a pack's licence; Kith does without where it is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LicenceState:
    """``ok``: a signed licence that holds, or none, which means the public non-commercial terms."""

    ok: bool
    message: str


def inspect(directory: Path, name: str) -> LicenceState | None:
    """Look for a signed MODEL.LICENSE in the pack; None where the library is absent or older than its licences."""
    if importlib.util.find_spec("insightface") is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # No dependency of Kith (docs/decisions/0002), so it is asked for by name.
            library = importlib.import_module("insightface.model_zoo.model_license")
    except ImportError:
        return None
    found = library.inspect_model_package_license(directory, expected_model_id=name)
    return LicenceState(bool(found.verified or found.defaulted), f"{found.status}: {found.message}")
