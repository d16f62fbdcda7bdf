"""Complete named runs, as functions of where the data lies and where the result goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from training.config import DataConfig, HeadConfig, LoopConfig, RunConfig


def compact(data: Path, output: Path) -> RunConfig:
    """The bundled recogniser: thin IResNet, CosFace, eight epochs of aligned CelebA crops (about an hour on 2 cores).

    A small scale and margin, since most people have four images: with s = 64 the loss is spent on few hard samples.
    """
    return RunConfig(
        name="compact",
        output=output,
        data=DataConfig(root=data),
        head=HeadConfig(name="cosface", scale=20.0, margin=0.25),
        loop=LoopConfig(epochs=8, margin_warmup_steps=1000),
    )


def smoke(data: Path, output: Path) -> RunConfig:
    """A few seconds: for tests, and to see that data and machine are in order before a long run."""
    return RunConfig(
        name="smoke",
        output=output,
        data=DataConfig(root=data, max_identities=40),
        head=HeadConfig(name="adacos"),
        loop=LoopConfig(epochs=1, batch_size=32, warmup_steps=2),
    )


Recipe = Callable[[Path, Path], RunConfig]
RECIPES: Mapping[str, Recipe] = MappingProxyType({"compact": compact, "smoke": smoke})
