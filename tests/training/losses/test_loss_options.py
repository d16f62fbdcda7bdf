"""Invalid options of heads and terms are rejected by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.losses.test_losses import CLASSES, DIM, head, term
from training.config import ConfigError, HeadConfig, TermConfig
from training.losses import build_head, build_term


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cosface", {"scale": -1.0}, "scale"),
        ("cosface", {"margin": -0.1}, r"\[0, 2\)"),
        ("cosface", {"margin": "wide"}, "must be a float"),
        ("cosface", {"marjin": 0.3}, "has no option marjin; it has scale, margin"),
        ("arcface", {"margin": 4.0}, r"\[0, pi\)"),
        ("arcface", {"beyond": "sideways"}, "linear"),
        ("sphereface", {"beyond": "future"}, "continuous"),
        ("combined", {"m1": -1.0}, "m1 > 0"),
        ("l_softmax", {"margin": 0}, "must be an integer"),
        ("l2_softmax", {"alpha": -2.0}, "alpha"),
        ("magface", {"l_a": 200.0}, "l_a < u_a"),
        ("adaface", {"h": 0.0}, "h > 0"),
        ("elasticface", {"kind": "tan"}, "arc"),
        ("subcenter_arcface", {"centers": 0}, "one center"),
        ("curricularface", {"momentum": 1.5}, "momentum"),
        ("adacos", {"scale_floor": -1.0}, "scale_floor"),
        ("softmaxx", {}, "not one of softmax"),
    ],
)
def test_invalid_head_options_are_rejected(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        head(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("triplet", {"margin": 5.0}, "angular margin"),
        ("triplet", {"mining": "none"}, "semi_hard"),
        ("center", {"alpha": 0.0}, "alpha"),
        ("range", {"k": 0}, "k >= 1"),
        ("contrastive", {"margin": 0.0}, "positive"),
        ("ring", {"radius": -1.0}, "positive"),
        ("mhe", {"power": -1.0}, "power"),
        ("tripplet", {}, "not one of"),
    ],
)
def test_invalid_term_options_are_rejected(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        term(name, **options)


def test_class_terms_need_a_head_with_class_weights() -> None:
    with pytest.raises(ConfigError, match="class weights"):
        build_term(TermConfig("inter"), head("none"), DIM, CLASSES)
    with pytest.raises(ConfigError, match="at least 3 classes"):
        build_head(HeadConfig("adacos"), DIM, 2)
    for name in ("normface", "softmax", "subcenter_arcface", "l_softmax"):
        with pytest.raises(ConfigError, match="at least 2 classes"):
            build_head(HeadConfig(name), DIM, 1)
