"""Memory, reading rate and duration of a run on several GPUs, computed before it starts."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.vision.alignment import CROP_SIZE_PX
from training import distributed
from training.backbones import build_backbone, checkpoint_blocks
from training.config import BackboneConfig, ConfigError, RunConfig

FLOAT_BYTES = 4
LOGIT_COPIES = 4
"""Matrices of the size of the logits that a step holds: cosines, logits, probabilities, gradient."""
MEASURED_STEPS = 3


@dataclass(frozen=True)
class Plan:
    """Bytes per GPU by purpose, images per second of all GPUs, bytes read per second, and seconds per epoch."""

    memory_bytes: dict[str, int]
    images_per_s: float
    read_bytes_per_s: float
    epoch_s: float

    def rows(self) -> list[tuple[str, str]]:
        memory = [(f"Memory per GPU: {name}", f"{size / 1e9:.2f} GB") for name, size in self.memory_bytes.items()]
        return [
            *memory,
            ("Memory per GPU", f"{sum(self.memory_bytes.values()) / 1e9:.2f} GB"),
            ("Images per second, all GPUs", f"{self.images_per_s:,.0f}"),
            ("Read per second", f"{self.read_bytes_per_s / 1e6:,.0f} MB"),
            ("Time per epoch", f"{self.epoch_s / 3600:.2f} h"),
        ]


def make_plan(config: RunConfig, images: int, classes: int, gpus: int, images_per_s: float, image_bytes: float) -> Plan:
    """Compute the plan of a run. Raises ConfigError: the batch does not divide by the GPUs.

    Args:
        images_per_s: measured speed of one GPU, see `measure_speed`.
        image_bytes: mean size of an encoded image.
    """
    loop = config.loop
    if loop.batch_size % (gpus * loop.accumulate):
        raise ConfigError(f"loop.batch_size {loop.batch_size} does not divide by {gpus} GPUs and loop.accumulate")
    with torch.device("meta"):
        backbone = build_backbone(config.backbone, config.data.crop_px)
    if loop.gradient_checkpointing:
        checkpoint_blocks(backbone)
    weights = sum(p.numel() for p in backbone.parameters()) * FLOAT_BYTES
    own = math.ceil(classes / gpus) if loop.class_sampling else classes
    batch = loop.batch_size // loop.accumulate
    used = min(own, max(math.ceil(own * loop.class_sampling), batch)) if loop.class_sampling else own
    row_bytes = config.backbone.embedding_dim * FLOAT_BYTES
    memory = {
        # Weights, gradients, momentum, the buckets of DistributedDataParallel, and the EMA network.
        "backbone": weights * (4 + bool(loop.ema_decay) + (gpus == 1) * -1),
        "activations": activation_bytes(backbone, batch // gpus, config.data.crop_px),
        # Weights and momentum of all own classes; gradients and unit vectors of those in use, and a copy of a sample.
        "classifier": own * row_bytes * 2 + used * row_bytes * (2 + (used < own)),
        "logits": batch * used * FLOAT_BYTES * LOGIT_COPIES,
    }
    speed = images_per_s * gpus
    return Plan(memory, speed, speed * image_bytes, images / speed)


def activation_bytes(backbone: nn.Module, batch: int, crop_px: int = CROP_SIZE_PX) -> int:
    """Return the bytes that a bf16 forward pass saves for its backward pass, without computing it."""
    network = backbone.to(device="meta", dtype=torch.bfloat16).train()
    parameters = {p.untyped_storage()._cdata for p in network.parameters()}
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    images = torch.empty(batch, 3, crop_px, crop_px, device="meta", dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        out = network(images)
    del out
    return sum(saved.values())


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
