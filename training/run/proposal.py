"""Settings proposed for a set of photos, before its first run, each with its reason."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from models.pack.loading import BUNDLED_PACK
from models.vision.alignment import CROP_SIZE_PX
from training import distributed
from training.backbones import build_backbone
from training.bounds import cosface_margin_bound, cosface_scale_bound, fixed_scale
from training.config import BackboneConfig, ConfigError, DataConfig, RunConfig
from training.optimization.distillation import load_teacher
from training.recipes import RECIPES

LARGE_SET_IMAGES: Final = 500_000
"""Images from which labels suffice, and at which the papers' s = 64 converged (training/losses/README.md)."""
SMALL_SET_MARGIN: Final = 0.35
LOWEST_SCALE: Final = 10.0
"""Lower end of the scales, 10 to 20, that scored highest in the trials with 300 and 2,000 people."""
PROBABILITY: Final = 0.9
"""Probability of a class center in CosFace's bound of the scale."""
SMALL_SET_IMAGES: Final = 20_000
"""Images below which AdamW and a large weight of the teacher are proposed. They were tried with 5,851 images."""
SMALL_SET_BATCH: Final = 64
ADAMW_RATE: Final = 0.002
"""Learning rate of AdamW for SMALL_SET_BATCH images."""
ADAMW_DECAY: Final = 0.05
ADAMW_REASON: Final = "with 300 people as good as SGD on LFW, 4 points better on CFP-FF (training/losses/README.md)"
TEACHER_WEIGHT: Final = 30.0
TEACHER_WEIGHT_REASON: Final = (
    "with 300 people 88 % of View 1 in 10 epochs; weight 1: 84 % in 8 (training/losses/README.md)"
)
MIN_BATCH: Final = 16
BATCHES_PER_EPOCH: Final = 16
"""Small sets get smaller batches, so that an epoch has at least this many of them."""
USUAL_STEPS: Final = 2600
"""Steps of the recipe `compact` on the 42,000 crops that it was made for."""
MAX_EPOCHS: Final = 40
FEW_PEOPLE: Final = 100
TEACHER_REASON: Final = (
    "few photos of few people: labels of 42,000 crops alone gave 86 % on LFW, a network's embeddings of a million "
    "images 97 %. Learn from both"
)
MEASURED_STEPS: Final = 3
CPU_BATCH: Final = 8
"""Images per measured step: a loaded machine takes a second for each."""


@dataclass(frozen=True)
class Choice:
    """One proposed setting: its name, value and reason."""

    setting: str
    value: str
    why: str


@dataclass(frozen=True)
class Proposal:
    """Settings for one set.

    Attributes:
        recipe: name in `RECIPES`.
        steps: optimizer steps of the run.
        images_per_second: training speed measured on ``device``, with the teacher, without reading photos.
        seconds: steps times batch, divided by the speed.
        scale_bounds: AdaCos's fixed scale, CosFace's lower bound of s, and CosFace's upper bound of m.
        command: command line that runs the proposal.
        notes: what the settings cannot mend.
    """

    recipe: str
    choices: tuple[Choice, ...]
    steps: int
    images_per_second: float
    seconds: float
    device: str
    scale_bounds: dict[str, float]
    command: str
    notes: tuple[str, ...]

    def rows(self) -> list[tuple[str, str, str]]:
        """Return settings, values and reasons for a table."""
        speed = f"{self.images_per_second:,.0f} images per second, measured now on this {self.device}; reading excluded"
        return [
            *((choice.setting, choice.value, choice.why) for choice in self.choices),
            ("steps", f"{self.steps:,}", "epochs times whole batches of an epoch"),
            ("expected time", duration(self.seconds), speed),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        return asdict(self)


def propose(data: DataConfig, people: int, images: int, device: torch.device) -> Proposal:
    """Propose recipe and settings for ``people`` with ``images`` in all, and measure the speed of ``device`` with a few
    steps. Nothing of the set is read. Raises ConfigError: the set has fewer than two people or two images."""
    if people < 2 or images < 2:
        raise ConfigError(f"{data.root}: training needs two people with images, not {people} with {images}")
    large = images >= LARGE_SET_IMAGES
    recipe = "medium" if large and device.type == "cuda" else "compact"
    teacher = None if large else BUNDLED_PACK
    output = Path("runs") / data.root.resolve().stem
    plain = RECIPES[recipe](data.root, output, teacher)
    trained = round(images * (1 - plain.data.held_out_people) * (1 - plain.data.held_out_photos))
    choices = [
        Choice("recipe", recipe, _recipe_reason(recipe, images, large)),
        *(
            []
            if data.crop_px == CROP_SIZE_PX
            else [Choice("data.crop_px", f"{data.crop_px}", "the side of your crops")]
        ),
        *([] if teacher is None else _taught(teacher, trained)),
        *_schedule(plain, trained),
        *([] if recipe == "medium" else _head(people, plain.backbone.embedding_dim)),
    ]
    chosen = {choice.setting: choice.value for choice in choices[1:] if choice.setting != "distill.teacher"}
    config = plain.overridden(chosen)
    steps = trained // config.loop.batch_size * config.loop.epochs
    speed = _images_per_second(config, device)
    return Proposal(
        recipe,
        tuple(choices),
        steps,
        speed,
        steps * config.loop.batch_size / speed,
        device.type,
        _bounds(people, config.backbone.embedding_dim),
        _command(data, recipe, teacher, output, chosen, plain),
        tuple(_notes(people, large, device)),
    )


def _recipe_reason(recipe: str, images: int, large: bool) -> str:
    if recipe == "medium":
        return f"{images:,} images and a GPU suffice for IResNet-34 and the papers' s = 64"
    if large:
        return "no GPU: the small network is the only one that ends in reasonable time"
    return f"{images:,} images are fewer than the {LARGE_SET_IMAGES:,} of the larger recipes"


def _taught(teacher: Path, images: int) -> list[Choice]:
    """Return teacher and weight."""
    choices = [Choice("distill.teacher", _short(teacher), TEACHER_REASON)]
    if images < SMALL_SET_IMAGES:
        choices.append(Choice("distill.weight", f"{TEACHER_WEIGHT:g}", TEACHER_WEIGHT_REASON))
    return choices


def _schedule(plain: RunConfig, images: int) -> list[Choice]:
    """Return batch, rate, epochs and warm-up of the margin."""
    usual = plain.loop
    batch, choices = usual.batch_size, [Choice("loop.batch_size", f"{usual.batch_size}", "the recipe's")]
    if images < SMALL_SET_IMAGES:
        power = 2 ** (images // BATCHES_PER_EPOCH).bit_length() // 2
        batch = max(min(MIN_BATCH, images), min(SMALL_SET_BATCH, power))
        rate = f"{ADAMW_RATE * batch / SMALL_SET_BATCH:.4g}"
        choices = [
            Choice("loop.batch_size", f"{batch}", f"the recipe's {usual.batch_size} would leave few steps per epoch"),
            Choice("loop.optimizer", "adamw", ADAMW_REASON),
            Choice("loop.learning_rate", rate, f"{ADAMW_RATE:g} for {SMALL_SET_BATCH} images, in proportion"),
            Choice("loop.weight_decay", f"{ADAMW_DECAY:g}", "as in that trial"),
        ]
    per_epoch = images // batch
    epochs = min(max(usual.epochs, round(USUAL_STEPS / per_epoch)), MAX_EPOCHS)
    reason = f"about the {USUAL_STEPS:,} steps that the recipe takes on 42,000 crops"
    if epochs == MAX_EPOCHS:
        reason = "at most: more would repeat few photos too often"
    elif epochs == usual.epochs:
        reason = "the recipe's"
    return [*choices, Choice("loop.epochs", f"{epochs}", reason), _margin_warmup(plain)]


def _margin_warmup(plain: RunConfig) -> Choice:
    share = plain.loop.margin_warmup
    return Choice("loop.margin_warmup", f"{share:g}", "share of the run in which the margin grows from 0")


def _head(people: int, dimension: int) -> list[Choice]:
    """Return scale and margin of CosFace for a small set."""
    fixed, least = fixed_scale(max(people, 3)), cosface_scale_bound(people, PROBABILITY)
    scale = round(max(LOWEST_SCALE, fixed, least), 1)
    why = (
        f"low scales scored highest in trials with few people, and s = 64 failed. AdaCos's fixed scale is {fixed:.1f}, "
        f"CosFace's lower bound {least:.1f}, the trials' lower end {LOWEST_SCALE:g}"
    )
    bound = cosface_margin_bound(people, dimension)
    return [
        Choice("head.name", "cosface", "as good as the other heads in the trials, at a suitable scale"),
        Choice("head.scale", f"{scale:g}", why),
        Choice(
            "head.margin",
            f"{SMALL_SET_MARGIN:g}",
            f"best at such a scale in the trials; far below the bound {bound:.2f}",
        ),
    ]


def _bounds(people: int, dimension: int) -> dict[str, float]:
    return {
        "adacos_fixed_scale": fixed_scale(max(people, 3)),
        "cosface_min_scale": cosface_scale_bound(people, PROBABILITY),
        "cosface_max_margin": cosface_margin_bound(people, dimension),
    }


def _images_per_second(config: RunConfig, device: torch.device) -> float:
    batch = config.loop.batch_size if device.type == "cuda" else min(config.loop.batch_size, CPU_BATCH)
    seconds = 1 / measure_speed(config.backbone, batch, device, config.data.crop_px)
    if config.distill.teacher is not None:
        teach = load_teacher(config.distill.teacher)
        images = torch.zeros(batch, 3, config.data.crop_px, config.data.crop_px)
        teach(images)  # warms up
        started = time.perf_counter()
        teach(images)
        seconds += (time.perf_counter() - started) / batch
    return 1 / seconds


def measure_speed(config: BackboneConfig, batch: int, device: torch.device, crop_px: int = CROP_SIZE_PX) -> float:
    """Return the images per second of forward and backward passes of one device, in the precision that a run uses by
    default: bf16 where the hardware multiplies it."""
    network = build_backbone(config, crop_px).train()
    network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9)
    images = torch.randn(batch, 3, crop_px, crop_px, device=device)
    started = 0.0
    for step in range(MEASURED_STEPS + 1):
        if step == 1:  # the first step warms up
            _wait(device)
            started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=distributed.has_native_bf16()):
            out = network(images.contiguous(memory_format=torch.channels_last))
        optimizer.zero_grad(set_to_none=True)
        out.float().square().mean().backward()
        optimizer.step()
    _wait(device)
    return batch * MEASURED_STEPS / (time.perf_counter() - started)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _command(
    data: DataConfig, recipe: str, teacher: Path | None, output: Path, chosen: dict[str, str], plain: RunConfig
) -> str:
    """Return the command line, with the settings that differ from the recipe's."""
    words = ["kith-train", "run", recipe, "--data", str(data.root), "--output", str(output)]
    words += ["--folder"] if data.manifest is None and data.root.suffix != ".rec" else []
    words += [] if data.aligned else ["--align-with", _short(BUNDLED_PACK)]
    words += [] if teacher is None else ["--teacher", _short(teacher)]
    for key, value in chosen.items():
        recipes_own = plain.head.name == value if key == "head.name" else plain.overridden({key: value}) == plain
        if not recipes_own:
            words += ["--epochs", value] if key == "loop.epochs" else ["--set", f"{key}={value}"]
    return shlex.join(words)


def _notes(people: int, large: bool, device: torch.device) -> list[str]:
    notes = []
    if people < FEW_PEOPLE:
        notes.append(
            f"{people} people teach little about strangers. To recognize these people, enroll them with a finished "
            "pack: that needs no training"
        )
    if large and device.type != "cuda":
        notes.append("this many images are worth a GPU and the recipe medium")
    return notes


def _short(path: Path) -> str:
    """Return a path relative to the current folder, if it is below it."""
    path, here = path.resolve(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def duration(seconds: float) -> str:
    """Return a duration in the largest unit that suits it."""
    for limit, unit, size in ((90, "s", 1), (90 * 60, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}" if unit != "h" else f"{seconds / size:.1f} h"
    return f"{seconds / 86400:.1f} days"
