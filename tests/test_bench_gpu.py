"""bench.gpu without a GPU reports so and exits with success; its parts can run on the CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from models.runtime.cuda_network import CUDA, visible_gpus
from models.runtime.onnx_runtime import available_providers
from tests.conftest import ROOT

pytestmark = pytest.mark.long


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(CUDA in available_providers() and bool(visible_gpus()), reason="a GPU is here")
def test_without_a_gpu_it_says_so_and_ends_well() -> None:
    done = bench()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("No GPU: ")
    assert done.stdout.strip().endswith("Nothing was measured.")


def test_a_rehearsal_prints_its_tables_and_writes_nothing() -> None:
    before = sorted((ROOT / "bench" / "results").iterdir())
    done = bench("--rehearse", "detector", "search")
    assert done.returncode == 0, done.stderr
    assert "| fp16 |" in done.stdout
    assert "| compact | 20,000 |" in done.stdout
    assert "meaningless figures" in done.stdout
    assert sorted((ROOT / "bench" / "results").iterdir()) == before
