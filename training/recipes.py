"""Complete named runs, as functions of where the data lies and where the result goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from training.config import AugmentConfig, BackboneConfig, DataConfig, HeadConfig, LoopConfig, RunConfig, TermConfig

Recipe = Callable[[Path, Path], RunConfig]


def compact(data: Path, output: Path) -> RunConfig:
    """The bundled recogniser: thin IResNet, CosFace, eight epochs of aligned CelebA crops (about an hour on 2 cores).

    A small scale and margin, since most people have four images: with s = 64 the loss is spent on few hard samples.
    """
    return RunConfig(
        name="compact",
        output=output,
        data=DataConfig(root=data),
        head=HeadConfig("cosface", {"scale": 20.0, "margin": 0.25}),
        loop=LoopConfig(epochs=8, margin_warmup_steps=1000),
    )


def smoke(data: Path, output: Path) -> RunConfig:
    """A few seconds: for tests, and to see that data and machine are in order before a long run."""
    return RunConfig(
        name="smoke",
        output=output,
        data=DataConfig(root=data, max_identities=40),
        head=HeadConfig("adacos"),
        loop=LoopConfig(epochs=1, batch_size=32, warmup_steps=2),
    )


def papers(data: Path, output: Path) -> RunConfig:
    """ArcFace's network and loss (IResNet-50, s = 64, m = 0.5, 512 images a batch) for a GPU and a set of CASIA's or
    MS1M's size, with a polynomial schedule over 20 epochs where the paper steps the rate."""
    return RunConfig(
        name="papers",
        output=output,
        data=DataConfig(root=data),
        backbone=BackboneConfig("iresnet50", embedding_dim=512, dropout=0.4),
        head=HeadConfig("arcface", {"scale": 64.0, "margin": 0.5}),
        augment=AugmentConfig(move=0.0, low_resolution=0.0, grey=0.0, brightness=0.0, contrast=0.0, erase=0.0),
        loop=LoopConfig(epochs=20, batch_size=512, schedule="poly", warmup_steps=2000, ema_decay=0.0),
    )


RECIPES: Mapping[str, Recipe] = MappingProxyType({"compact": compact, "smoke": smoke, "papers": papers})

# The seed notes' losses at the settings of ArcFace's comparison (its section 3.2), AdaCos's own, and two margins at
# scales that suit a small set. A head and the terms beside it.
SEED_LOSSES: Mapping[str, tuple[HeadConfig, tuple[TermConfig, ...]]] = MappingProxyType(
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
    """One of SEED_LOSSES on the comparison's subset and budget: the first ``people`` of those with five images or
    more. All runs see equally many images in batches of 128, with one schedule; nothing is tuned for any of them.

    A loss over pairs of a batch needs people to come several times in it, so that the triplets' batches are balanced.
    """
    head, terms = SEED_LOSSES[loss]
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
