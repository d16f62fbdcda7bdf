"""The toy of two dimensions shows what the papers say of softmax and margins."""

from __future__ import annotations

import math

import numpy as np
import pytest

from training.evaluation.toy import PEOPLE, Toy, arcs_rad, gaps_deg, misleading_triple, shortest_person, train_toy


@pytest.fixture(scope="module")
def softmax() -> Toy:
    return train_toy("softmax_no_bias")


def ring(spread_rad: float) -> Toy:
    """People on the unit circle, each with three embeddings."""
    middles = 2 * math.pi * np.arange(PEOPLE) / PEOPLE
    directions = (middles[:, None] + spread_rad * np.array([-1, 0, 1])).ravel()
    x_N2 = np.stack([np.cos(directions), np.sin(directions)], 1)
    weights = np.stack([np.cos(middles), np.sin(middles)], 1)
    return Toy(x_N2, np.repeat(np.arange(PEOPLE), 3), weights, np.zeros(PEOPLE))


def test_a_margin_opens_gaps_between_the_arcs(softmax: Toy) -> None:
    arcface = train_toy("arcface", {"scale": 16.0, "margin": 0.5, "beyond": "continuous"})
    without, with_margin = gaps_deg(arcs_rad(softmax)), gaps_deg(arcs_rad(arcface))
    assert with_margin.mean() > without.mean() + 5
    assert with_margin.min() > 15
    assert arcface.accuracy(normalized=True) > 0.98


def test_distances_of_softmax_mislead(softmax: Toy) -> None:
    first, second, third = misleading_triple(softmax)
    labels, x = softmax.labels_N, softmax.x_N2
    assert labels[first] != labels[second] == labels[third]
    assert 2 * np.linalg.norm(x[first] - x[second]) < np.linalg.norm(x[second] - x[third])
    assert softmax.accuracy(normalized=True) > softmax.accuracy(normalized=False)
    # A longer embedding of the same direction is more certain (NormFace, proposition 1).
    person = int(labels[third])
    shares = softmax.probability(person, x[third] * np.array([[0.1], [0.3], [1.0]]))
    assert (np.diff(shares) > 0).all()
    total = sum(softmax.probability(c, x[:5]) for c in range(PEOPLE))
    np.testing.assert_allclose(total, 1)


def test_toys_are_reproducible(softmax: Toy) -> None:
    again = train_toy("softmax_no_bias")
    np.testing.assert_array_equal(again.x_N2, softmax.x_N2)
    assert train_toy("softmax").biases_C.tolist() != [0] * PEOPLE
    with pytest.raises(ValueError, match="no class weights"):
        train_toy("coco")


def test_arcs_cover_the_embeddings_and_gaps_lie_between_them() -> None:
    toy = ring(0.1)
    spans = arcs_rad(toy)
    np.testing.assert_allclose(spans[:, 1] - spans[:, 0], 0.19, atol=1e-9)  # quantiles of three values
    np.testing.assert_allclose(gaps_deg(spans), 45 - math.degrees(0.19), atol=1e-9)
    assert (gaps_deg(arcs_rad(ring(0.6))) < 0).all()  # the arcs overlap
    short = Toy(np.where(toy.labels_N[:, None] == 5, 0.25, 1) * toy.x_N2, toy.labels_N, toy.weights_C2, toy.biases_C)
    person, share = shortest_person(short)
    assert person == 5
    assert share == pytest.approx(0.25)
