"""A step on a GPU does not wait for it: nothing asks tensors for their values.

Tensors of the device ``meta`` have no values, so that asking raises an error.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.training.runs import tiny_run, write_people
from training import distributed
from training.config import AugmentConfig, HeadConfig
from training.data.augment import augment, draw_uniforms
from training.losses import HEADS, PartialFC, build_head
from training.optimization.monitor import measure_embeddings
from training.run.train import train_recognizer

META = torch.device("meta")


@pytest.fixture
def without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_args, **_options: nullcontext())


def test_asking_for_a_value_is_noticed() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device=META).nonzero()
    with pytest.raises((RuntimeError, NotImplementedError)):
        float(torch.zeros((), device=META))


def test_augmentation_does_not_wait() -> None:
    every = AugmentConfig(mask=0.5, rotation_deg=6.0, saturation=0.2, low_resolution=0.9)
    crops = torch.zeros(16, 3, 112, 112, device=META)
    assert augment(crops, draw_uniforms(16, 7, 3), every).device == META


@pytest.mark.usefixtures("without_autocast")
@pytest.mark.parametrize("name", sorted(HEADS))
def test_a_head_does_not_wait(name: str) -> None:
    head = build_head(HeadConfig(name), 16, 40).to(META)
    embeddings = torch.zeros(8, 16, device=META, requires_grad=True)
    labels = torch.zeros(8, dtype=torch.long, device=META)
    head.begin_step(labels)
    head(embeddings, labels).backward()
    measured = {**head.log_values(), **measure_embeddings(head, embeddings, labels)}
    assert "embedding_norm" in measured


@pytest.mark.usefixtures("without_autocast")
@pytest.mark.parametrize("name", ["cosface", "arcface", "combined", "adaface", "magface"])
def test_partial_fc_does_not_wait(name: str) -> None:
    head = PartialFC(build_head(HeadConfig(name), 16, 40), 0.5).to(META)  # type: ignore[arg-type]
    embeddings = torch.zeros(8, 16, device=META, requires_grad=True)
    labels = torch.zeros(8, dtype=torch.long, device=META)
    head.begin_step(labels)
    head(embeddings, labels).backward()
    assert embeddings.grad is not None


def test_steps_do_not_read_the_processors_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    whole = Path.read_text

    def counted(self: Path, *arguments: str, **options: str) -> str:
        read.append(self)
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", counted)
    distributed.has_native_bf16.cache_clear()
    train_recognizer(tiny_run(write_people(tmp_path / "people"), tmp_path / "run", "cosface", precision="auto"))
    assert read.count(Path("/proc/cpuinfo")) <= 1
