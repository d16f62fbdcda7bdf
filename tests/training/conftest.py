"""Fixtures: one thread, no pictures where nothing looks at them, and one finished run for all tests that read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.training.runs import tiny_run, write_people
from training.evaluation import plots
from training.run.train import train_recognizer


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two waiting threads on busy cores take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def pictures() -> None:
    """Draw the pictures of runs and reports."""


@pytest.fixture(autouse=True)
def _no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw none without the fixture `pictures`: the picture of a tiny run takes longer than its training."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(plots, "loss_curves", lambda path: None)
        monkeypatch.setattr(plots, "png", lambda figure: b"")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the photos ``people`` and a run of one epoch, ``run``. Tests only read it."""
    root = tmp_path_factory.mktemp("finished")
    torch.set_num_threads(1)
    train_recognizer(tiny_run(write_people(root / "people"), root / "run", "cosface", epochs=1))
    return root
