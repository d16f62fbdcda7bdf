"""A finished run, or a pack, as what embeds crops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models.alignment import STANDARD, Alignment
from models.network import Float
from models.pack import load_pack
from models.recognition import Recogniser, unit
from models.runtime import OnnxNetwork
from training import distributed
from training.backbones import build_backbone
from training.benchmarks import Embed
from training.config import RunConfig
from training.loop import to_tensor
from training.run_folder import CHECKPOINT, CONFIG, averaged_weights, read_run

Crops = NDArray[np.uint8]


def load_run(output: Path) -> tuple[RunConfig, nn.Module]:
    """A run's settings and its averaged network, in evaluation mode.

    Raises:
        ConfigError: the run has no checkpoint.
    """
    config = read_run(output)
    backbone = build_backbone(config.backbone)
    backbone.load_state_dict(averaged_weights(output / CHECKPOINT))
    return config, backbone.eval().to(distributed.device())


def embedder(network: nn.Module) -> Callable[[Crops], Float]:
    """A torch network as a function from (n, 112, 112, 3) uint8 crops to (n, d) unit vectors."""

    @torch.no_grad()
    def embed(crops: Crops) -> Float:
        device = next(network.parameters()).device
        parts = [
            network(to_tensor(crops[i : i + 128], device)).float().cpu().numpy() for i in range(0, len(crops), 128)
        ]
        return unit(np.concatenate(parts))

    return embed


def embed_of(what: Path) -> tuple[Embed, Alignment]:
    """The embedder of a run, or of a pack, and how its crops are cut."""
    if (what / CONFIG).is_file():
        return embedder(load_run(what)[1]), STANDARD
    spec = load_pack(what).recognition
    return Recogniser(OnnxNetwork(spec.path), spec).embed, spec.alignment
