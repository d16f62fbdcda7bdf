"""Named training recipes: functions from data, output and teacher to a complete run configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from models.pack.loading import BUNDLED_PACK
from training.bounds import fixed_scale
from training.config import (
    AugmentConfig,
    BackboneConfig,
    BackboneName,
    DataConfig,
    DistillConfig,
    HeadConfig,
    LoopConfig,
    RunConfig,
    TermConfig,
)

Recipe = Callable[[Path, Path, Path | None], RunConfig]
"""Function of the data path, the output path and an optional teacher (pack, network or run)."""
SMALL_SET_IMAGES: Final = 20_000
"""Images below which `few` is chosen. It was tried with 6,641."""
MIN_BATCH: Final = 16
BATCHES_PER_EPOCH: Final = 16
"""Small sets get smaller batches, so that an epoch has at least this many of them."""
USUAL_STEPS: Final = 1900
"""Steps of `few`: ten minutes on two cores."""

ARCFACE: Final = HeadConfig("arcface", {"scale": 64.0, "margin": 0.5})
COSFACE: Final = HeadConfig("cosface", {"scale": 64.0, "margin": 0.4})


def compact(data: Path, output: Path, teacher: Path | None = None) -> RunConfig:
    """Return a recipe from labels alone: thin IResNet, CosFace, eight epochs (one hour on 2 cores for aligned CelebA).
    Scale and margin are small, since most people have four images: s = 64 would focus the loss on few hard samples."""
    return RunConfig(
        name="compact",
        output=output,
        data=DataConfig(root=data),
        head=HeadConfig("cosface", {"scale": 20.0, "margin": 0.25}),
        distill=DistillConfig(teacher),
        loop=LoopConfig(epochs=8, margin_warmup=0.2),
    )


def few(data: Path, output: Path, teacher: Path | None = None) -> RunConfig:
    """Return a recipe for fewer than 20,000 photos: AdamW, and mostly the embeddings of a teacher, by default the
    bundled pack (training/losses/README.md, "Below 1,000 people"). `sized` sets what depends on their number.

    The teacher's embeddings are of the photos as they are, so that photos are moved, but hardly degraded.
    """
    return RunConfig(
        name="few",
        output=output,
        data=DataConfig(root=data),
        head=HeadConfig("cosface", {"scale": 10.0, "margin": 0.35}),
        augment=AugmentConfig(low_resolution=0.1, gray=0.0, brightness=0.1, contrast=0.1, erase=0.0),
        distill=DistillConfig(teacher or BUNDLED_PACK, weight=30.0),
        loop=LoopConfig(
            epochs=40, batch_size=64, optimizer="adamw", learning_rate=0.004, weight_decay=0.05, margin_warmup=0.2
        ),
    )


def few_labels(data: Path, output: Path, teacher: Path | None = None) -> RunConfig:
    """Return the recipe `few` from labels alone: ArcFace, and stronger augmentation, since a network soon memorizes the
    labels of so few photos."""
    usual = few(data, output)
    return replace(
        usual,
        name="few-labels",
        head=HeadConfig("arcface", {"scale": 20.0, "margin": 0.5}),
        augment=AugmentConfig(move=0.9, shift=0.05, zoom=0.1, rotation_deg=8.0, erase=0.3),
        distill=DistillConfig(teacher),
        loop=replace(usual.loop, learning_rate=0.003),
    )


def sized(config: RunConfig, people: int, images: int) -> RunConfig:
    """Return the recipe `few` or `few-labels` with epochs, batch, rate and scale for a number of people and images:
    about USUAL_STEPS in 8 to 40 epochs, a rate in proportion to the batch, and the trials' scale or AdaCos's, whichever
    is larger."""
    trained = round(images * (1 - config.data.held_out_people) * (1 - config.data.held_out_photos))
    usual = config.loop
    power = 2 ** (trained // BATCHES_PER_EPOCH).bit_length() // 2
    batch = max(min(MIN_BATCH, trained), min(usual.batch_size, power))
    epochs = min(max(LoopConfig.epochs, round(USUAL_STEPS / (trained // batch))), usual.epochs)
    rate = usual.learning_rate * batch / usual.batch_size
    scale = max(config.head.options["scale"], round(fixed_scale(max(people, 3)), 1))
    return replace(
        config,
        head=replace(config.head, options={**config.head.options, "scale": scale}),
        loop=replace(usual, epochs=epochs, batch_size=batch, learning_rate=rate),
    )


def smoke(data: Path, output: Path, teacher: Path | None = None) -> RunConfig:
    """Return a recipe of a few seconds, to check data and machine before a long run."""
    return RunConfig(
        name="smoke",
        output=output,
        data=DataConfig(root=data, max_identities=40),
        head=HeadConfig("adacos"),
        distill=DistillConfig(teacher),
        loop=LoopConfig(epochs=1, batch_size=32),
    )


def papers(data: Path, output: Path, teacher: Path | None = None) -> RunConfig:
    """Return a recipe close to ArcFace's: IResNet-50, s = 64, m = 0.5, 512 images per batch, for a GPU and CASIA or
    MS1M. The rate falls by ten at shares of the run that the paper uses for CASIA. All people are trained on."""
    return RunConfig(
        name="papers",
        output=output,
        data=DataConfig(root=data, held_out_people=0, held_out_photos=0),
        backbone=BackboneConfig("iresnet50", embedding_dim=512, dropout=0.4),
        head=ARCFACE,
        augment=AugmentConfig(move=0.0, low_resolution=0.0, gray=0.0, brightness=0.0, contrast=0.0, erase=0.0),
        distill=DistillConfig(teacher),
        loop=LoopConfig(epochs=34, batch_size=512, schedule="step", ema_decay=0.0),
    )


PUBLISHED: Final[Mapping[str, tuple[BackboneName, HeadConfig, Mapping[str, Any]]]] = {
    "ms1mv3-r50": ("iresnet50", ARCFACE, {}),
    "ms1mv3-r100": ("iresnet100", ARCFACE, {}),
    "glint360k": ("iresnet100", COSFACE, {"weight_decay": 1e-4}),
    "webface42m": (
        "iresnet100",
        COSFACE,
        {"batch_size": 4096, "learning_rate": 0.3, "warmup": 1 / 20, "class_sampling": 0.2},
    ),
}
"""Networks, heads and other settings of the loop of arcface_torch's configs/ms1mv3_r50.py, ms1mv3_r100.py,
glint360k_r100.py and wf42m_pfc02_16gpus_r100.py, whose figures are in docs/training.md."""


def _published(name: str, data: Path, output: Path, teacher: Path | None = None) -> RunConfig:
    """Return a recipe of PUBLISHED. They share (deepinsight/insightface 7fadd420, train_v2.py): 8 GPUs with 128 images
    each, SGD at 0.1 that falls linearly to 0 in 20 epochs, Partial FC with all classes, and flips only."""
    backbone, head, special = PUBLISHED[name]
    loop = LoopConfig(
        epochs=20,
        batch_size=1024,
        schedule="poly",
        poly_power=1.0,
        warmup=0.0,
        ema_decay=0.0,
        class_sampling=1.0,
        sharded_checkpoint=True,
    )
    return RunConfig(
        name=name,
        output=output,
        data=DataConfig(data, None, min_images=1, held_out_people=0, held_out_photos=0, workers=8),
        backbone=BackboneConfig(backbone, 512),
        head=head,
        augment=AugmentConfig(move=0.0, low_resolution=0.0, gray=0.0, brightness=0.0, contrast=0.0, erase=0.0),
        distill=DistillConfig(teacher),
        loop=replace(loop, **special),
    )


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {"few": few, "few-labels": few_labels, "compact": compact, "smoke": smoke, "papers": papers}
    | {name: partial(_published, name) for name in PUBLISHED}
)
VALIDATION_SETS: Final = ("lfw", "cfp_fp", "agedb_30")
"""Files NAME.bin that InsightFace ships beside train.rec, and with which runs are validated by default."""


def shipped_sets(data: Path) -> tuple[Path, ...]:
    """Return the `VALIDATION_SETS` beside a record file."""
    files = [data.with_name(f"{name}.bin") for name in VALIDATION_SETS] if data.suffix == ".rec" else []
    return tuple(file for file in files if file.is_file())


# Heads and terms: the papers' losses at the settings of ArcFace, section 3.2, AdaCos, and two margins at scales for
# small sets. Weights of terms are those of the papers; range loss, whose paper gives none, compares unit vectors. The
# margins of L- and A-softmax end as far as SphereFace's schedule is after as many images as the comparison has.
PUBLISHED_LOSSES: Mapping[str, tuple[HeadConfig, tuple[TermConfig, ...]]] = MappingProxyType(
    {
        "softmax": (HeadConfig("softmax"), ()),
        "normface-64": (HeadConfig("normface", {"scale": 64.0}), ()),
        "normface-20": (HeadConfig("normface", {"scale": 20.0}), ()),
        "normface-learned": (HeadConfig("normface", {"scale": 20.0, "learn_scale": True}), ()),
        "softmax-no-bias": (HeadConfig("softmax_no_bias"), ()),
        "coco": (HeadConfig("coco"), ()),
        "class-contrastive": (HeadConfig("agents"), (TermConfig("class_contrastive"),)),
        "class-triplet": (HeadConfig("agents"), (TermConfig("class_triplet"),)),
        "sphereface": (HeadConfig("sphereface", {"scale": 64.0, "margin": 1.35}), ()),
        "cosface": (HeadConfig("cosface", {"scale": 64.0, "margin": 0.35}), ()),
        "arcface": (HeadConfig("arcface", {"scale": 64.0, "margin": 0.5}), ()),
        "cm1": (HeadConfig("cm1", {"scale": 64.0}), ()),
        "cm2": (HeadConfig("cm2", {"scale": 64.0}), ()),
        "adacos-fixed": (HeadConfig("adacos_fixed"), ()),
        "adacos": (HeadConfig("adacos"), ()),
        "cosface-30": (HeadConfig("cosface", {"scale": 30.0, "margin": 0.35}), ()),
        "cosface-adaptive": (HeadConfig("adaptive_cosface", {"margin": 0.35}), ()),
        "arcface-20": (HeadConfig("arcface", {"scale": 20.0, "margin": 0.5}), ()),
        "triplet": (HeadConfig("none"), (TermConfig("triplet", 1.0, {"margin": 0.35}),)),
        "arcface-intra-inter": (
            HeadConfig("arcface", {"scale": 64.0, "margin": 0.5}),
            (TermConfig("intra"), TermConfig("inter")),
        ),
        "normface-64-intra": (HeadConfig("normface", {"scale": 64.0}), (TermConfig("intra"),)),
        "normface-64-inter": (HeadConfig("normface", {"scale": 64.0}), (TermConfig("inter"),)),
        "sphereface-mhe": (HeadConfig("sphereface", {"scale": 64.0, "margin": 1.35}), (TermConfig("mhe"),)),
        "l2-softmax": (HeadConfig("l2_softmax"), ()),
        "l-softmax": (HeadConfig("l_softmax", {"lambda_min": 77.0}), ()),
        "a-softmax": (HeadConfig("a_softmax", {"lambda_min": 77.0}), ()),
        "center": (HeadConfig("softmax"), (TermConfig("center", 0.003),)),
        "range": (HeadConfig("softmax"), (TermConfig("range", 0.01, {"normalized": True}),)),
        "ring": (HeadConfig("softmax"), (TermConfig("ring", 0.01),)),
        "contrastive": (HeadConfig("softmax"), (TermConfig("contrastive", 0.05),)),
        "subcenter-arcface": (HeadConfig("subcenter_arcface"), ()),
        "curricularface": (HeadConfig("curricularface"), ()),
        "magface": (HeadConfig("magface"), ()),
        "adaface": (HeadConfig("adaface"), ()),
        "elasticface": (HeadConfig("elasticface"), ()),
    }
)
COMPARISON_PEOPLE = 2000
FIRST_SEED = LoopConfig.seed
BALANCED_IMAGES_PER_PERSON = 4
BALANCED_HEADS, BALANCED_TERMS = frozenset({"coco"}), frozenset({"triplet", "contrastive", "range"})
"""Losses that need several images per person in a batch."""


def compared(
    loss: str, data: Path, output: Path, epochs: int = 4, people: int = COMPARISON_PEOPLE, seed: int = FIRST_SEED
) -> RunConfig:
    """Return the configuration of one of PUBLISHED_LOSSES for `kith-train compare`.

    All losses share the first ``people`` with at least five images, batches of 128 and one schedule, without tuning.
    Rate and margin rise over a quarter of it: over a twentieth, ArcFace at s = 20 ended two points of View 2 lower.
    CoCo and the losses over pairs use identity-balanced batches, since they need several images per person.
    """
    head, terms = PUBLISHED_LOSSES[loss]
    balanced = head.name in BALANCED_HEADS or any(term.name in BALANCED_TERMS for term in terms)
    return RunConfig(
        name=loss,
        output=output,
        data=DataConfig(
            root=data,
            min_images=5,
            max_identities=people,
            images_per_person=BALANCED_IMAGES_PER_PERSON if balanced else 0,
            held_out_people=0,
            held_out_photos=0,
        ),
        head=head,
        terms=terms,
        loop=LoopConfig(epochs=epochs, warmup=0.25, margin_warmup=0.25, ema_decay=0.99, seed=seed),
    )
