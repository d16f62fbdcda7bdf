"""Registry of losses: heads turn embeddings and labels into a loss, terms are added to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn

from training.config import ConfigError, HeadConfig, Option, TermConfig
from training.losses import terms
from training.losses.adaptive import (
    AdaCos,
    AdaFace,
    CurricularFace,
    ElasticFace,
    FixedAdaCos,
    MagFace,
    SubCenterArcFace,
)
from training.losses.core import Agents, Head, NoHead
from training.losses.margins import AdaptiveCosFace, ArcFace, CombinedMargin, CosFace, NormFace, SphereFace
from training.losses.softmax import ASoftmax, BatchCentroids, L2Softmax, LSoftmax, Softmax, SoftmaxWithoutBias

HEADS: Mapping[str, Callable[..., Head]] = MappingProxyType(
    {
        "softmax": Softmax,
        "softmax_no_bias": SoftmaxWithoutBias,
        "l2_softmax": L2Softmax,
        "normface": NormFace,
        "coco": BatchCentroids,
        "l_softmax": LSoftmax,
        "a_softmax": ASoftmax,
        "sphereface": SphereFace,
        "cosface": CosFace,
        "adaptive_cosface": AdaptiveCosFace,
        "arcface": ArcFace,
        "combined": CombinedMargin,
        "cm1": partial(CombinedMargin, m1=1.0, m2=0.3, m3=0.2),
        "cm2": partial(CombinedMargin, m1=0.9, m2=0.4, m3=0.15),
        "adacos": AdaCos,
        "adacos_fixed": FixedAdaCos,
        "subcenter_arcface": SubCenterArcFace,
        "curricularface": CurricularFace,
        "magface": MagFace,
        "adaface": AdaFace,
        "elasticface": ElasticFace,
        "agents": Agents,
        "none": NoHead,
    }
)
TERMS: Mapping[str, Callable[..., terms.Term]] = MappingProxyType(
    {
        "intra": terms.Intra,
        "inter": terms.Inter,
        "mhe": terms.MinimumEnergy,
        "class_contrastive": terms.ClassContrastive,
        "class_triplet": terms.ClassTriplet,
        "triplet": terms.Triplet,
        "center": terms.Center,
        "range": terms.Range,
        "contrastive": terms.Contrastive,
        "ring": terms.Ring,
    }
)


def build_head(config: HeadConfig, embedding_dim: int, num_classes: int) -> Head:
    """Build a head from its name and options. Raises ConfigError on an unknown head or option, or invalid value. The
    message lists the valid names."""
    return _build("head", HEADS, config.name, config.options, embedding_dim, num_classes)


def build_term(config: TermConfig, head: Head, embedding_dim: int, num_classes: int) -> terms.Term:
    """Build a loss term from its name and options. Raises ConfigError as `build_head` does; or the term needs class
    weights and the head has none."""
    term = _build("terms", TERMS, config.name, config.options, embedding_dim, num_classes)
    if isinstance(term, terms.ClassTerm) and head.class_weights() is None:
        raise ConfigError(f"terms.{config.name} needs class weights, and this head has none")
    return term


Built = TypeVar("Built", bound=nn.Module)


def list_options(factory: Callable[..., nn.Module]) -> dict[str, Any]:
    """Return the options of a head or term with their defaults."""
    signature = inspect.signature(factory)
    return {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def _build(
    section: str,
    factories: Mapping[str, Callable[..., Built]],
    name: str,
    options: Mapping[str, Option],
    embedding_dim: int,
    num_classes: int,
) -> Built:
    if name not in factories:
        raise ConfigError(f"{section} {name!r} is not one of {', '.join(factories)}")
    known = list_options(factories[name])
    if unknown := options.keys() - known.keys():
        valid = f"; it has {', '.join(known)}" if known else ""
        raise ConfigError(f"{section} {name} has no option {', '.join(sorted(unknown))}{valid}")
    for option, value in options.items():
        # An int is accepted for a float option; bool is a subclass of int and needs its own check.
        expected = type(known[option])
        if not (isinstance(value, expected) or (expected is float and type(value) is int)) or (
            expected is not bool and isinstance(value, bool)
        ):
            raise ConfigError(f"{section}.{option} of {name} must be a {expected.__name__}, not {value!r}")
    try:
        return factories[name](embedding_dim, num_classes, **options)
    except ValueError as error:
        raise ConfigError(f"{section} {name}: {error}") from error
