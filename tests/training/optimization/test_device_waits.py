"""A step on a GPU does not wait for it: nothing asks tensors for their values, or copies to it from pageable memory.

Tensors of the device ``meta`` have no values, so that asking raises an error.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.training.runs import TINY, tiny_run
from training.backbones import build_backbone
from training.config import AugmentConfig, HeadConfig, TermConfig
from training.data.augment import augment, draw_uniforms
from training.data.batches import Batch
from training.losses import HEADS, TERMS, build_head, build_term
from training.optimization.loop import train_step
from training.optimization.monitor import measure_embeddings
from training.optimization.objective import build_objective
from training.optimization.state import TrainingState

META = torch.device("meta")


@pytest.fixture
def without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_args, **_options: nullcontext())


class Copies(TorchFunctionMode):
    """Record of the copies to a device. Raises an error at one from pageable memory, or for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._pinned: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.pin_memory:
            copied = args[0].clone()
            self._pinned.add(copied.data_ptr())
            return copied
        result: Any = func(*args, **kwargs)
        sources = [arg for arg in args if isinstance(arg, Tensor)]
        to_meta = isinstance(result, Tensor) and result.device == META
        if to_meta and func in (Tensor.to, Tensor.copy_) and sources[-1].device.type == "cpu":
            self.count += 1
            assert kwargs.get("non_blocking"), "the host waits for a copy"
            assert sources[-1].data_ptr() in self._pinned, "a copy from pageable memory"
        made = func in (torch.tensor, torch.as_tensor, torch.from_numpy)
        assert not (made and isinstance(result, Tensor) and result.device == META), "a number is copied to the device"
        return result


def test_augmentation_does_not_wait() -> None:
    every = AugmentConfig(mask=0.5, rotation_deg=6.0, low_resolution=0.9)
    crops, uniforms = torch.zeros(16, 3, 112, 112, device=META), draw_uniforms(16, 7, 3)
    with Copies() as copies:
        assert augment(crops, uniforms, every).device == META
    assert copies.count > 10


@pytest.mark.usefixtures("without_autocast")
@pytest.mark.parametrize(
    "settings",
    [
        {"head.name": "cosface"},
        {"head.name": "adacos", "terms.center": "0.01", "terms.ring": "0.1"},
        {"head.name": "l2_softmax", "loop.optimizer": "adamw"},
        {"head.name": "cosface", "loop.class_sampling": "0.5", "loop.accumulate": "2"},
        {"head.name": "adaface", "loop.class_sampling": "1.0"},
    ],
    ids=["cosface", "adacos", "adamw", "partial_fc", "all_classes"],
)
def test_a_step_does_not_wait(tmp_path: Path, settings: dict[str, str]) -> None:
    config = tiny_run(tmp_path, tmp_path / "run").overridden(settings)
    with META:
        state = TrainingState(build_backbone(TINY), build_objective(config, 40), config.loop, META)
    labels = torch.zeros(8, dtype=torch.long, device=META)
    crops = torch.zeros(8, 112, 112, 3, dtype=torch.uint8, device=META)
    batch = Batch(0, np.arange(8), crops, labels, draw_uniforms(8, 7, 0))
    with Copies() as copies:
        for _ in range(2):
            result = train_step(state.backbone, state, batch, config, 100)
    assert result.measured["loss"].device == META
    assert copies.count > 0


@pytest.mark.usefixtures("without_autocast")
@pytest.mark.parametrize("name", [*HEADS, *TERMS])
def test_a_head_or_term_does_not_wait(name: str) -> None:
    head = build_head(HeadConfig(name if name in HEADS else "cosface"), 16, 40).to(META)
    embeddings, weights = (torch.zeros(rows, 16, device=META, requires_grad=True) for rows in (8, 40))
    labels = torch.zeros(8, dtype=torch.long, device=META)
    if name in TERMS:
        build_term(TermConfig(name), head, 16, 40).to(META).train()(embeddings, labels, weights).backward()
        return
    head.begin_step(labels)
    head(embeddings, labels).backward()
    measured = {**head.log_values(), **measure_embeddings(head, embeddings, labels)}
    assert "embedding_norm" in measured
