"""Complete named runs, as functions of where the data lies and where the result goes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from training.config import (
    AugmentConfig,
    BackboneConfig,
    ConfigError,
    DataConfig,
    DistillConfig,
    HeadConfig,
    LoopConfig,
    RunConfig,
    TermConfig,
)

Recipe = Callable[[Path, Path, Path | None], RunConfig]
"""Of where the data lies, where the run goes, and a teacher (a pack, a network or a run) or None."""


def distilled(data: Path, output: Path, teacher: Path | None = None) -> RunConfig:
    """The bundled recogniser: a thin IResNet that learns the embeddings of dlib's network, without labels.

    42,000 crops teach a network little about who is who, but let it ask another one about any face: two in five of an
    epoch's are blends of two people. Sharp crops come twice, since probes are sharper than most of CelebA here.
    ``scale`` is what gives dlib's coordinates a standard deviation of 1 on these crops.

    Raises:
        ConfigError: without a teacher there is nothing to learn.
    """
    if teacher is None:
        raise ConfigError(
            "the recipe distilled needs a --teacher: `kith models pull dlib-resnet` fetches the bundled one's"
        )
    return RunConfig(
        name="distilled",
        output=output,
        data=DataConfig(root=data, sharp_repeats=2),
        backbone=BackboneConfig(embedding_dim=128, depths=(1, 3, 2)),
        head=HeadConfig("none"),
        augment=AugmentConfig(rotation_deg=6.0, saturation=0.3, morph=0.4),
        distill=DistillConfig(teacher, match="euclidean", scale=29.0, views=3),
        loop=LoopConfig(epochs=18, batch_size=64, optimiser="adamw", learning_rate=2e-3, weight_decay=0.05),
    )


def compact(data: Path, output: Path, teacher: Path | None = None) -> RunConfig:
    """From labels alone: thin IResNet, CosFace, eight epochs of aligned CelebA crops (about an hour on 2 cores).

    A small scale and margin, since most people have four images: with s = 64 the loss is spent on few hard samples.
    """
    return RunConfig(
        name="compact",
        output=output,
        data=DataConfig(root=data),
        head=HeadConfig("cosface", {"scale": 20.0, "margin": 0.25}),
        distill=DistillConfig(teacher),
        loop=LoopConfig(epochs=8, margin_warmup_steps=1000),
    )


def smoke(data: Path, output: Path, teacher: Path | None = None) -> RunConfig:
    """A few seconds: for tests, and to see that data and machine are in order before a long run."""
    return RunConfig(
        name="smoke",
        output=output,
        data=DataConfig(root=data, max_identities=40),
        head=HeadConfig("adacos"),
        distill=DistillConfig(teacher),
        loop=LoopConfig(epochs=1, batch_size=32, warmup_steps=2),
    )


def medium(data: Path, output: Path, teacher: Path | None = None) -> RunConfig:
    """IResNet-34 with ArcFace, for a GPU and a set of half a million photos or more, which needs little variation."""
    return RunConfig(
        name="medium",
        output=output,
        data=DataConfig(root=data, min_images=5),
        backbone=BackboneConfig("iresnet34", embedding_dim=512, dropout=0.2),
        head=HeadConfig("arcface", {"scale": 64.0, "margin": 0.5}),
        augment=AugmentConfig(low_resolution=0.1, grey=0.02, erase=0.05),
        distill=DistillConfig(teacher),
        loop=LoopConfig(epochs=20, batch_size=512, schedule="poly", warmup_steps=2000, margin_warmup_steps=4000),
    )


def papers(data: Path, output: Path, teacher: Path | None = None) -> RunConfig:
    """ArcFace's network and loss (IResNet-50, s = 64, m = 0.5, 512 images a batch) for a GPU and a set of CASIA's or
    MS1M's size, with a polynomial schedule over 20 epochs where the paper steps the rate."""
    return RunConfig(
        name="papers",
        output=output,
        data=DataConfig(root=data),
        backbone=BackboneConfig("iresnet50", embedding_dim=512, dropout=0.4),
        head=HeadConfig("arcface", {"scale": 64.0, "margin": 0.5}),
        augment=AugmentConfig(move=0.0, low_resolution=0.0, grey=0.0, brightness=0.0, contrast=0.0, erase=0.0),
        distill=DistillConfig(teacher),
        loop=LoopConfig(epochs=20, batch_size=512, schedule="poly", warmup_steps=2000, ema_decay=0.0),
    )


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {"distilled": distilled, "compact": compact, "smoke": smoke, "medium": medium, "papers": papers}
)

# The papers' losses at the settings of ArcFace's comparison (its section 3.2), AdaCos's own, and two margins at
# scales that suit a small set. A head and the terms beside it.
PUBLISHED_LOSSES: Mapping[str, tuple[HeadConfig, tuple[TermConfig, ...]]] = MappingProxyType(
    {
        "softmax": (HeadConfig("softmax"), ()),
        "normface-64": (HeadConfig("normface", {"scale": 64.0}), ()),
        "normface-20": (HeadConfig("normface", {"scale": 20.0}), ()),
        "sphereface": (HeadConfig("sphereface", {"scale": 64.0, "margin": 1.35}), ()),
        "cosface": (HeadConfig("cosface", {"scale": 64.0, "margin": 0.35}), ()),
        "arcface": (HeadConfig("arcface", {"scale": 64.0, "margin": 0.5}), ()),
        "cm1": (HeadConfig("cm1", {"scale": 64.0}), ()),
        "cm2": (HeadConfig("cm2", {"scale": 64.0}), ()),
        "adacos-fixed": (HeadConfig("adacos_fixed"), ()),
        "adacos": (HeadConfig("adacos"), ()),
        "cosface-adaptive": (HeadConfig("adaptive_cosface", {"margin": 0.35}), ()),
        "arcface-20": (HeadConfig("arcface", {"scale": 20.0, "margin": 0.5}), ()),
        "triplet": (HeadConfig("none"), (TermConfig("triplet", 1.0, {"margin": 0.35}),)),
        "arcface-intra-inter": (
            HeadConfig("arcface", {"scale": 64.0, "margin": 0.5}),
            (TermConfig("intra"), TermConfig("inter")),
        ),
    }
)
COMPARED_PEOPLE = 2000
TRIPLET_IMAGES_PER_PERSON = 4


def compared(loss: str, data: Path, output: Path, epochs: int = 4, people: int = COMPARED_PEOPLE) -> RunConfig:
    """One of PUBLISHED_LOSSES on the comparison's subset and budget: the first ``people`` of those with five images or
    more. All runs see equally many images in batches of 128, with one schedule; nothing is tuned for any of them.

    A loss over pairs of a batch needs people to come several times in it, so that the triplets' batches are balanced.
    """
    head, terms = PUBLISHED_LOSSES[loss]
    return RunConfig(
        name=loss,
        output=output,
        data=DataConfig(
            root=data,
            min_images=5,
            max_identities=people,
            images_per_person=TRIPLET_IMAGES_PER_PERSON if head.name == "none" else 0,
        ),
        head=head,
        terms=terms,
        loop=LoopConfig(epochs=epochs, warmup_steps=100, margin_warmup_steps=100, ema_decay=0.99),
    )


def departures(run: Mapping[str, Any]) -> list[str]:
    """What ``--set`` must say for the recipe to give a run, as a pack tells of it: ``section.key=value``."""
    name = run["name"]
    if name not in RECIPES:
        return []
    # Any folder will do for the data and the teacher, which the command names by itself.
    teacher = run["distill"]["teacher"]
    recipe = RECIPES[name](Path(), Path(name), Path() if teacher else None)
    plain = {**_flat(recipe.shareable()), "data.root": run["data"]["root"], "distill.teacher": teacher}
    changed = {key: value for key, value in _flat(run).items() if plain.get(key) != value}
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changed.items()]


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict):
            # A head's and a term's options are set as if they were its own keys.
            found |= _flat(value, prefix if key == "options" else f"{prefix}{key}.")
        elif key == "terms":
            for term in value:
                found[f"terms.{term['name']}"] = term["weight"]
                found |= _flat(term["options"], f"terms.{term['name']}.")
        elif key == "validation":
            found[key] = ",".join(value)
        else:
            found[f"{prefix}{key}"] = value
    return found
