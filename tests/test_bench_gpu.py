"""bench.gpu without a GPU reports so and exits with success; its parts can run on the CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from models.runtime.cuda_network import CUDA, visible_gpus
from models.runtime.onnx_runtime import available_providers
from tests.conftest import ROOT

HAS_GPU = CUDA in available_providers() and bool(visible_gpus())


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        pytest.param([], ["No GPU: ", "Nothing was measured."], marks=pytest.mark.skipif(HAS_GPU, reason="a GPU")),
        (
            ["--rehearse", "detector", "search"],
            ["| fp16 |", "| 20,000 |", "meaningless figures"],
        ),
    ],
)
def test_it_prints_and_writes_nothing(arguments: list[str], printed: list[str]) -> None:
    before = sorted((ROOT / "bench" / "results").iterdir())
    command = [sys.executable, "-m", "bench.gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [text for text in printed if text not in done.stdout] == []
    assert sorted((ROOT / "bench" / "results").iterdir()) == before
