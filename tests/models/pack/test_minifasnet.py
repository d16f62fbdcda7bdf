"""The joined liveness network computes the mean of its two networks."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime
import pytest

from models.errors import PackError
from models.pack.manifest import load_liveness
from models.pack.minifasnet import FACE_SIZES, THRESHOLD, join_networks, write_minifasnet
from models.pack.verification import run_networks
from models.vision.specs import BoxCrops, Normalization
from tests.networks import network


def small_network(seed: int, batch: int | str = "batch") -> bytes:
    """Return a network with the ports of MiniFASNet's published ONNX files: pixels in 0..255 to three logits."""
    rng = np.random.default_rng(seed)
    weights = {
        "kernel": rng.normal(0, 0.3, (6, 3, 8, 8)) / 255,
        "slope": rng.uniform(0, 0.5, (6, 1, 1)),
        "classes": rng.normal(0, 1, (6, 3)),
    }
    nodes = (
        "maps = Conv<strides = [8, 8]> (input, kernel)",
        "active = PRelu (maps, slope)",
        "pooled = GlobalAveragePool (active)",
        "flat = Flatten (pooled)",
        "output = Gemm (flat, classes)",
    )
    given, found = [f"float[{batch}, 3, 80, 80] input"], [f"float[{batch}, 3] output"]
    constants = {name: value.astype(np.float32) for name, value in weights.items()}
    with TemporaryDirectory() as folder:
        return network(Path(folder, "small.onnx"), given, found, *nodes, opset=17, **constants).read_bytes()


def written(folder: Path, *contents: bytes) -> list[Path]:
    files = [folder / f"{number}.onnx" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    return files


@pytest.mark.parametrize("batch", ["batch", 1])
def test_the_score_is_the_mean_of_both_networks(batch: int | str, tmp_path: Path, rng: np.random.Generator) -> None:
    files = written(tmp_path, small_network(0, batch), small_network(1, batch))
    session = onnxruntime.InferenceSession(join_networks(files).SerializeToString())
    colors = rng.integers(0, 256, (1 if batch == 1 else 5, 3, 4, 8)).astype(np.float32)
    crops = np.repeat(np.repeat(colors, 20, axis=2), 20, axis=3)
    (scores,) = session.run(None, {"input": crops})
    expected = np.zeros((len(crops), 1))
    for number, file in enumerate(files):
        half = crops[..., 80 * number : 80 * number + 80]
        (logits,) = onnxruntime.InferenceSession(file).run(None, {"input": half})
        powers = np.exp(logits)
        expected += powers[:, 1:2] / powers.sum(axis=1, keepdims=True) / 2
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert expected.std() > 0.001 or batch == 1


def test_the_written_network_has_the_crops_of_its_authors(tmp_path: Path) -> None:
    folder = tmp_path / "network"
    folder.mkdir()
    write_minifasnet(folder, written(tmp_path, small_network(0), small_network(1)))
    spec = load_liveness(folder)
    assert (spec.crop, spec.shape) == (BoxCrops(80, FACE_SIZES), (80, 160))
    assert (spec.normalization, spec.live_class) == (Normalization(0.0, 1.0, "BGR"), None)
    assert spec.threshold == THRESHOLD
    assert run_networks(folder, "liveness") == "ran liveness.onnx"


def test_other_networks_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"1\.onnx: is not an ONNX file"):
        join_networks(written(tmp_path, small_network(0), b"no network"))
