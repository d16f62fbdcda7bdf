"""Weights from and to InsightFace's arcface_torch, whose networks are the same and name their layers otherwise."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any, Final

import torch
from torch import Tensor, nn

from training.backbones import build_backbone
from training.backbones.iresnet import DEPTHS
from training.backbones.mobilefacenet import WIDTH
from training.config import BackboneConfig, BackboneName, ConfigError, DataConfig, HeadConfig, RunConfig
from training.optimization.run_folder import CHECKPOINT, load_checkpoint, load_run, save_atomically, write_run_config
from training.optimization.sharded import read_class_weights

BLOCK: Final = ("bn1", "conv1", "bn2", "prelu", "conv2", "bn3")
MBF_STAGES: Final = ((2, 4), (4, 6), (6, 2))
"""Layers of the blocks that stride, and the number of blocks in the layer after each."""
RANK_FILE: Final = re.compile(r"(.*_gpu_)(\d+)(\.pt)")
"""Checkpoint of one rank with its share of the classes, in the order of the ranks."""
MAX_REASON: Final = 300
"""Characters of torch's list of layers that differ."""


def import_weights(path: Path, name: BackboneName, output: Path) -> int | None:
    """Write ``model.pt`` or ``checkpoint_gpu_0.pt`` as a run, to evaluate, export, pack, or start other runs from.
    Return its number of class centers, None without. Code in the file is not run. Raises ConfigError if the file has
    other layers than this network, or ``output`` has a checkpoint."""
    if (output / CHECKPOINT).exists():
        raise ConfigError(f"{output} has a checkpoint. Name another --output")
    document = _read(path)
    theirs = document.get("state_dict_backbone", document)
    theirs = {key.removeprefix("module."): value for key, value in theirs.items()}
    try:
        config = _config(path, name, theirs)
        backbone = build_backbone(config.backbone, config.data.crop_px)
        ours = {their: our for our, their in _names(backbone)}
        backbone.load_state_dict({ours.get(key, key): value for key, value in theirs.items()})
    except (KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{path} is no {name} of arcface_torch: {shorten(str(error), MAX_REASON)}") from error
    centers_CD = _centers(path, document)
    write_run_config(output, {**config.as_dict(), "output": str(output)}, output / CHECKPOINT, mutable=())
    head = {} if centers_CD is None else {"weight": centers_CD.float()}
    save_atomically(output / CHECKPOINT, {"averaged": backbone.state_dict(), "head": head, "step": 0})
    return None if centers_CD is None else len(centers_CD)


def export_weights(run: Path, output: Path, classes: bool) -> None:
    """Write the network of a run as arcface_torch's ``model.pt``; with ``classes``, as the checkpoint of one rank with
    the class centers. Raises ConfigError if arcface_torch has no such network, or the run no centers."""
    _, backbone = load_run(run)
    state = backbone.cpu().state_dict()
    document: dict[str, Any] = {theirs: state[ours] for ours, theirs in _names(backbone)}
    if classes:
        centers_CD = read_class_weights(run, load_checkpoint(run / CHECKPOINT))
        if centers_CD is None:
            raise ConfigError(f"{run} has no class centers. Leave out --classes")
        document = {"state_dict_backbone": document, "state_dict_softmax_fc": {"weight": centers_CD}}
    output.parent.mkdir(parents=True, exist_ok=True)
    save_atomically(output, document)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} is no file of weights that torch reads without running its code: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no state dict. Save it with torch.save(model.state_dict(), ...)")
    return document


def _config(path: Path, name: BackboneName, theirs: dict[str, Any]) -> RunConfig:
    """Return settings with the sizes that the weights state: embedding, crop, width."""
    if name in DEPTHS:
        side, dim, width = math.isqrt(theirs["fc.weight"].shape[1] // 512), len(theirs["fc.weight"]), 1
    else:
        side, dim = theirs["features.layers.0.layers.0.weight"].shape[-1], len(theirs["features.layers.2.weight"])
        width = len(theirs["layers.0.layers.0.weight"]) // WIDTH
    backbone = BackboneConfig(name, embedding_dim=dim, width=width)
    data = DataConfig(Path(), None, crop_px=16 * side, held_out_people=0, held_out_photos=0)
    return RunConfig("imported", path.parent, data, backbone, HeadConfig("none"), imported=True)


def _centers(path: Path, document: dict[str, Any]) -> Tensor | None:
    """Return the (C, d) class centers of a checkpoint and those of the other ranks beside it, or None without."""
    if "state_dict_softmax_fc" not in document:
        return None
    own: Tensor = document["state_dict_softmax_fc"]["weight"]
    if (match := RANK_FILE.fullmatch(path.name)) is None:
        return own
    files = {int(RANK_FILE.sub(r"\2", file.name)): file for file in path.parent.glob(f"{match[1]}*{match[3]}")}
    if sorted(files) != list(range(len(files))):
        raise ConfigError(f"{path.parent} lacks the checkpoint of a rank: it has those of {sorted(files)}")
    parts = [own if files[rank] == path else _read(files[rank])["state_dict_softmax_fc"]["weight"] for rank in files]
    return torch.cat([parts[list(files).index(rank)] for rank in range(len(files))])


def _names(backbone: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each key of the state dict and its name in arcface_torch. Raises ConfigError without such a network."""
    match type(backbone).__name__:
        case "IResNet":
            modules = dict(_iresnet_modules(backbone))
        case "MobileFaceNet":
            modules = dict(_mobilefacenet_modules())
        case other:
            raise ConfigError(f"arcface_torch has no {other}. Its networks are IResNets and MobileFaceNet")
    for key in backbone.state_dict():
        module, _, value = key.rpartition(".")
        yield key, f"{modules[module]}.{value}"


def _iresnet_modules(backbone: nn.Module) -> Iterator[tuple[str, str]]:
    yield from (("stem.0", "conv1"), ("stem.1", "bn1"), ("stem.2", "prelu"))
    layer = place = 0
    for i, block in enumerate(backbone.get_submodule("body").children()):
        first = bool(list(block.get_submodule("shortcut").children()))  # of its stage: it halves the side
        layer, place = (layer + 1, 0) if first else (layer, place + 1)
        theirs = f"layer{layer}.{place}"
        yield from ((f"body.{i}.body.{j}", f"{theirs}.{name}") for j, name in enumerate(BLOCK))
        yield from ((f"body.{i}.shortcut.{j}", f"{theirs}.downsample.{j}") for j in range(2))
    yield from (("head.0", "bn2"), ("head.3", "fc"), ("head.4", "features"))


def _mobilefacenet_modules() -> Iterator[tuple[str, str]]:
    yield from ((f"stem.{i}.{j}", f"layers.{i}.layers.{j}") for i in range(2) for j in range(3))
    places = []
    for layer, others in MBF_STAGES:
        places += [f"layers.{layer}", *(f"layers.{layer + 1}.layers.{i}" for i in range(others))]
    for i, theirs in enumerate(places):
        yield from ((f"body.{i}.body.{j}.{k}", f"{theirs}.layers.{j}.layers.{k}") for j in range(2) for k in range(3))
        yield from ((f"body.{i}.body.{j + 2}", f"{theirs}.layers.2.layers.{j}") for j in range(2))
    yield from ((f"body.{len(places)}.{j}", f"conv_sep.layers.{j}") for j in range(3))
    yield from ((f"head.{j}", f"features.layers.0.layers.{j}") for j in range(2))
    yield from (("head.3", "features.layers.2"), ("head.4", "features.layers.3"))
