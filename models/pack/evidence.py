"""Calibrations and metrics of downloadable packs that ship with this version of Kith."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from models.risk.calibration import Calibration

EVIDENCE_DIR: Final = Path(__file__).parents[1] / "evidence"
"""Outputs of `kith-train measure`."""


def read_evidence(name: str) -> dict[str, Any]:
    """Return the calibration and metrics of a pack, with the checksums of the networks that they belong to."""
    evidence: dict[str, Any] = json.loads((EVIDENCE_DIR / f"{name}.json").read_text(encoding="utf-8"))
    return evidence


def read_measured() -> dict[str, Calibration]:
    """Return the calibration of each measured pack, by name."""
    names = sorted(file.stem for file in EVIDENCE_DIR.glob("*.json"))
    return {name: Calibration.from_document(read_evidence(name)["calibration"]) for name in names}
