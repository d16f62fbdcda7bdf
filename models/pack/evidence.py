"""Calibrations and metrics of downloadable packs that ship with this version of Kith."""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def accuracy_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) rows of a pack's accuracy on LFW."""
    view2, wide = metrics["lfw_view2"], metrics["lfw_open_set"]
    return [
        ("LFW View 2 accuracy", f"{view2['accuracy']['mean']:.2%} ± {view2['accuracy']['std']:.2%}"),
        ("LFW View 2 TAR at FAR 0.1 %", f"{view2['tar_at_far_1e3']:.1%}"),
        ("LFW View 2 EER", f"{view2['eer']:.2%}"),
        ("LFW open set rank-1", f"{wide['rank1']:.1%}"),
        *(
            (f"LFW open set FNIR at FPIR {float(rate):.1%}", f"{fnir:.1%} (threshold {wide['thresholds'][rate]:.3f})")
            for rate, fnir in wide["fnir"].items()
        ),
    ]
