"""What a pack misses is known before there is a gallery."""

from __future__ import annotations

import numpy as np
import pytest

from models.pack.evidence import read_evidence, read_measured
from models.pack.loading import BUNDLED_PACK, load_pack
from models.risk.calibration import Calibration
from service.risk.risk_report import EXAMPLE_SUBJECTS, expected_misses, target_thresholds
from service.risk.threshold import ImpostorRisk


def calibration_of(name: str) -> Calibration:
    return Calibration.from_document(read_evidence(name)["calibration"])


def test_a_pack_that_misses_fewer_is_named() -> None:
    document = load_pack(BUNDLED_PACK).calibration
    assert document is not None
    bundled, measured = Calibration.from_document(document), read_measured()
    rates = [expected_misses(fpir, bundled, measured) for fpir in (0.01, 0.001, 0.0001)]
    assert np.all(np.diff([found.fnir for found in rates]) > 0)  # a smaller risk misses more
    for found in rates:
        assert found.subject_count == EXAMPLE_SUBJECTS
        assert found.better is not None
        name = found.better.model
        assert name == "open-model-zoo"
        assert found.better.fnir == expected_misses(found.fpir, calibration_of(name), {}).fnir < found.fnir
    for others in (measured, {}):
        assert expected_misses(0.01, calibration_of("open-model-zoo"), others).better is None


@pytest.mark.parametrize("photos", [1.0, 3.0, 2.5])
def test_thresholds_count_people_and_not_their_photos(photos: float) -> None:
    calibration = calibration_of("open-model-zoo")
    model = ImpostorRisk(calibration.curve, "pack", comparisons_per_subject=photos)
    (found,) = target_thresholds([0.01], 4, model, None, calibration)
    assert (found.today.subject_count, found.grown.subject_count) == (4, 40)
    single = ImpostorRisk(calibration.curve, "pack")
    (compared,) = target_thresholds([0.01], int(4 * photos), single, None, calibration)
    assert (found.today.threshold, found.grown.threshold) == (compared.today.threshold, compared.grown.threshold)
