"""ONNX Runtime networks split batches, report their provider and send no telemetry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from models.errors import PackError, RuntimeUnavailableError
from models.pack.loading import BUNDLED_PACK
from models.pack.manifest import ModelPack
from models.runtime.onnx_files import finalize_onnx
from models.runtime.onnx_runtime import BATCH_BUCKETS, OnnxNetwork, available_cores, choose_bucket, split_batch
from tests.networks import flat_network


def test_batches_are_split_without_padding() -> None:
    assert [choose_bucket(n) for n in (1, 2, 3, 9, 32, 33)] == [1, 2, 4, 16, 32, 32]

    def lengths(count: int, sizes: tuple[int, ...] = BATCH_BUCKETS) -> list[int]:
        return [rows.stop - rows.start for rows in split_batch(count, sizes)]

    assert lengths(7) == [4, 2, 1]
    assert lengths(69) == [32, 32, 4, 1]
    assert lengths(0) == []
    assert lengths(5, (1, 4)) == [4, 1]
    assert lengths(7, (3,)) == [3, 3, 1]


def test_any_batch_size_gives_every_row(pack: ModelPack, rng: np.random.Generator) -> None:
    network = OnnxNetwork(pack.recognition.path)
    crops = rng.standard_normal((BATCH_BUCKETS[-1] + 5, 3, 112, 112)).astype(np.float32)
    whole = network.run(crops)[0]
    assert whole.shape[0] == len(crops)
    alone = np.concatenate([network.run(crop[None])[0] for crop in crops[::9]])
    assert np.allclose(whole[::9], alone, atol=1e-3)


def test_placement_reports_the_provider_of_nodes(pack: ModelPack) -> None:
    placed = OnnxNetwork(pack.recognition.path).placement(np.zeros((1, 3, 112, 112), np.float32))
    assert set(placed) <= {"CPUExecutionProvider", "CUDAExecutionProvider"}
    assert sum(placed.values()) > 10


def test_a_missing_provider_is_not_replaced_silently(pack: ModelPack) -> None:
    with pytest.raises(RuntimeUnavailableError, match="OtherExecutionProvider"):
        OnnxNetwork(pack.recognition.path, "OtherExecutionProvider")


def test_an_invalid_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"not a network")
    with pytest.raises(PackError, match=r"x\.onnx"):
        OnnxNetwork(tmp_path / "x.onnx")


def test_available_cores_respect_the_affinity() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
    only_one = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from models.runtime.onnx_runtime import available_cores; print(available_cores())"
    )
    done = subprocess.run([sys.executable, "-c", only_one], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_no_file_appears_under_the_home_directory(tmp_path: Path) -> None:
    """onnxruntime 1.31 writes telemetry there by default."""
    script = (
        "import numpy as np\nfrom pathlib import Path\nfrom models.runtime.onnx_runtime import OnnxNetwork\n"
        f"OnnxNetwork(Path({str(BUNDLED_PACK / 'recognizer.onnx')!r})).run(np.zeros((1, 3, 112, 112), np.float32))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY" and not k.startswith("XDG_")}
    environment |= {"HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert not list(tmp_path.rglob("*"))


def test_outputs_without_a_batch_axis_are_kept_whole(tmp_path: Path, rng: np.random.Generator) -> None:
    """SCRFD exports of InsightFace return (n, k) without a batch axis."""
    photos = rng.random((2, 3, 2, 2)).astype(np.float32)
    first, _ = OnnxNetwork(flat_network(tmp_path / "flat.onnx")).run(photos)
    assert np.array_equal(first.reshape(2, 12), photos.reshape(2, 12))


@pytest.mark.parametrize("slopes", [[-0.6], [0.2, -1.5]], ids=["one slope", "a slope a channel"])
def test_an_activation_of_one_slope_becomes_one_that_is_fused(
    slopes: list[float], tmp_path: Path, rng: np.random.Generator
) -> None:
    slope = numpy_helper.from_array(np.array(slopes, np.float32).reshape(-1, 1, 1), "slope")
    nodes = [helper.make_node("PRelu", [a, "slope"], [b]) for a, b in (("input", "middle"), ("middle", "output"))]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, 3, 3]) for name in ("input", "output")]
    model = helper.make_model(
        helper.make_graph(nodes, "activations", ends[:1], ends[1:], [slope]),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )
    source, target = tmp_path / "source.onnx", tmp_path / "target.onnx"
    onnx.save(model, str(source))
    finalize_onnx(source, target, {})
    written = onnx.load(str(target)).graph
    fused = len(slopes) == 1
    assert {node.op_type for node in written.node} == {"LeakyRelu" if fused else "PRelu"}
    assert len(written.initializer) == (0 if fused else 1)
    x = rng.normal(size=(1, 2, 3, 3)).astype(np.float32)
    np.testing.assert_allclose(OnnxNetwork(target).run(x)[0], OnnxNetwork(source).run(x)[0], rtol=1e-6)
