"""Every loss by its name: heads turn embeddings and labels into a loss, terms are added to one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn

from training.config import ConfigError, HeadConfig, Option, TermConfig
from training.losses.adacos import AdaCos, FixedAdaCos
from training.losses.adaptive import AdaFace, CurricularFace, ElasticFace, MagFace, SubCenterArcFace
from training.losses.core import CosineHead, Head, NoHead
from training.losses.margins import AdaptiveCosFace, ArcFace, CombinedMargin, CosFace, NormFace, SphereFace
from training.losses.multiplicative import ASoftmax, LSoftmax
from training.losses.partial_fc import PartialFC
from training.losses.softmax import L2Softmax, Softmax
from training.losses.terms import (
    Center,
    ClassTerm,
    Contrastive,
    Inter,
    Intra,
    MinimumEnergy,
    Range,
    Ring,
    Term,
    Triplet,
)

HEADS: Mapping[str, Callable[..., Head]] = MappingProxyType(
    {
        "softmax": Softmax,
        "l2_softmax": L2Softmax,
        "normface": NormFace,
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
        "none": NoHead,
    }
)
TERMS: Mapping[str, Callable[..., Term]] = MappingProxyType(
    {
        "intra": Intra,
        "inter": Inter,
        "mhe": MinimumEnergy,
        "triplet": Triplet,
        "center": Center,
        "range": Range,
        "contrastive": Contrastive,
        "ring": Ring,
    }
)


def build_head(config: HeadConfig, embedding_dim: int, num_classes: int) -> Head:
    """A head by name and options.

    Raises:
        ConfigError: there is no such head or option, or a value makes no sense; the message lists what there is.
    """
    return _build("head", HEADS, config.name, config.options, embedding_dim, num_classes)


def build_term(config: TermConfig, head: Head, embedding_dim: int, num_classes: int) -> Term:
    """A term by name and options, for this head.

    Raises:
        ConfigError: as for a head; or the term is about class weights, which the head does not have.
    """
    term = _build("terms", TERMS, config.name, config.options, embedding_dim, num_classes)
    if isinstance(term, ClassTerm) and head.class_weights() is None:
        raise ConfigError(f"terms.{config.name} is about class weights, which this head does not have")
    return term


Built = TypeVar("Built", bound=nn.Module)


def options_of(factory: Callable[..., nn.Module]) -> dict[str, Any]:
    """What a head or term can be given, with the defaults."""
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
    known = options_of(factories[name])
    if unknown := options.keys() - known.keys():
        may = f"; it has {', '.join(known)}" if known else ""
        raise ConfigError(f"{section} {name} has no option {', '.join(sorted(unknown))}{may}")
    for option, value in options.items():
        # A whole number will do for a float, nothing else for anything else.
        wanted = type(known[option])
        if not (isinstance(value, wanted) or (wanted is float and type(value) is int)) or (
            wanted is not bool and isinstance(value, bool)
        ):
            raise ConfigError(f"{section}.{option} of {name} must be a {wanted.__name__}, not {value!r}")
    try:
        return factories[name](embedding_dim, num_classes, **options)
    except ValueError as error:
        raise ConfigError(f"{section} {name}: {error}") from error


__all__ = [
    "HEADS",
    "TERMS",
    "ASoftmax",
    "AdaCos",
    "AdaFace",
    "AdaptiveCosFace",
    "ArcFace",
    "CombinedMargin",
    "CosFace",
    "CosineHead",
    "CurricularFace",
    "ElasticFace",
    "FixedAdaCos",
    "Head",
    "L2Softmax",
    "LSoftmax",
    "MagFace",
    "NormFace",
    "PartialFC",
    "Softmax",
    "SphereFace",
    "SubCenterArcFace",
    "Term",
    "build_head",
    "build_term",
]
