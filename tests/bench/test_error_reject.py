"""The error-versus-reject curve of the quality bench."""

from __future__ import annotations

import numpy as np
import pytest

from bench.quality import error_against_reject, error_versus_reject


def test_error_versus_reject_drops_the_worse_photo_first(rng: np.random.Generator) -> None:
    similarities, quality = rng.normal(0.5, 0.2, 200), rng.permutation(400).reshape(200, 2).astype(float)
    rows = sorted(range(200), key=lambda row: min(quality[row]))
    expected = [
        sum(similarities[row] < 0.4 for row in rows[dropped:]) / (200 - dropped) for dropped in (0, 10, 50, 199)
    ]
    assert error_versus_reject(similarities, quality, 0.4, (0, 0.05, 0.25, 0.995)) == pytest.approx(expected)
    telling = np.stack([similarities, np.ones(200)], 1)
    assert error_versus_reject(similarities, telling, np.quantile(similarities, 0.2), (0.25,)).tolist() == [0]


def test_error_against_reject_has_one_line_per_measure() -> None:
    shares = np.array([0.0, 0.1, 0.2])
    figure = error_against_reject(
        shares,
        {"a": np.array([0.3, 0.2, 0.1]), "b": np.array([0.3, 0.3, 0.2])},
        (shares + 0.1, shares + 0.3),
        "Rejecting",
    )
    lines = [np.asarray(line.get_xydata()).tolist() for line in figure.axes[0].lines]
    assert lines[0] == [[0, 0.3], [0.1, 0.2], [0.2, 0.1]]
    assert lines[1] == [[0, 0.3], [0.1, 0.3], [0.2, 0.2]]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["chance, 95 %", "a", "b"]  # type: ignore[union-attr]
