"""GPU networks match the CPU and reject failing devices. Without a GPU the same code runs on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, load_model_from_string, save

from models.errors import RuntimeUnavailableError
from models.pack.manifest import ModelPack
from models.runtime import cuda_network
from models.runtime.cuda_network import CUDA, CudaNetwork, Device, convert_to_fp16, diagnose_cuda, visible_gpus
from models.runtime.network import Float
from models.runtime.onnx_runtime import OnnxNetwork, available_providers, profile_nodes
from models.vision.detection import Detector
from tests.networks import flat_network

HERE = Device("cuda") if CUDA in available_providers() and visible_gpus() else Device("cpu")
CROP = (3, 112, 112)


def recognizer_on(
    pack: ModelPack,
    sizes: Sequence[int] = (1, 2, 4),
    half: bool = True,
) -> CudaNetwork:
    probe = np.random.default_rng(1).uniform(-1, 1, (1, *CROP)).astype(np.float32)
    return CudaNetwork(pack.recognition.path, [(n, *CROP) for n in sizes], probe, HERE, half)


def cosines(a: Float, b: Float) -> Float:
    return np.asarray((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))


def test_batches_match_the_cpu_in_order(pack: ModelPack, rng: np.random.Generator) -> None:
    network, full = recognizer_on(pack), OnnxNetwork(pack.recognition.path)
    assert network.precision == "fp16"
    assert recognizer_on(pack, half=False).precision == "fp32"
    crops = rng.uniform(-1, 1, (9, *CROP)).astype(np.float32)
    (expected,) = full.run(crops)
    assert cosines(expected, np.roll(expected, 1, axis=0)).max() < 0.999, "too similar to check the order"
    for count in (1, 2, 3, 4, 9):
        (found,) = network.run(crops[:count])
        assert found.shape == expected[:count].shape
        assert cosines(found, expected[:count]).min() > 0.999
    made = load_model_from_string(convert_to_fp16(pack.recognition.path))
    assert {t.data_type for t in made.graph.initializer if len(t.dims) > 1} <= {TensorProto.FLOAT16, TensorProto.INT64}
    ends = [*made.graph.input, *made.graph.output]
    assert {end.type.tensor_type.elem_type for end in ends} == {TensorProto.FLOAT}


def test_results_survive_the_next_run(pack: ModelPack, rng: np.random.Generator) -> None:
    """Results must be copies, since the next batch overwrites the buffers."""
    network = recognizer_on(pack)
    crops = rng.uniform(-1, 1, (4, *CROP)).astype(np.float32)
    first = network.run(crops)[0]
    kept = first.copy()
    network.run(-crops)
    assert np.array_equal(first, kept)


def test_threads_share_a_network(pack: ModelPack, rng: np.random.Generator) -> None:
    """Its buffers hold one batch at a time."""
    network, full = recognizer_on(pack), OnnxNetwork(pack.recognition.path)
    batches = [rng.uniform(-1, 1, (1 + i % 4, *CROP)).astype(np.float32) for i in range(40)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda batch: network.run(batch)[0], batches))
    assert (
        min(cosines(vectors, full.run(batch)[0]).min() for vectors, batch in zip(found, batches, strict=True)) > 0.999
    )


def test_a_session_meets_one_shape(pack: ModelPack, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime makes cuDNN's plans anew whenever the shape of a session changes, which took 3 to 5 s on an H100."""
    bound: list[tuple[int, tuple[int, ...]]] = []
    run = cuda_network._run_bound

    def record(prepared: Any) -> list[Float]:
        bound.append((id(prepared.session), prepared.staging.shape))
        return run(prepared)

    monkeypatch.setattr(cuda_network, "_run_bound", record)
    network = recognizer_on(pack)
    for count in (1, 4, 2, 1, 7, 4):
        network.run(np.zeros((count, *CROP), np.float32))
    assert {shape for _, shape in bound} == {(count, *CROP) for count in (1, 2, 4)}
    assert len(bound) == 3 + 7
    assert len(set(bound)) == len({session for session, _ in bound}) == 3


def test_unprepared_shapes_run(pack: ModelPack, rng: np.random.Generator) -> None:
    photos = rng.uniform(-1, 1, (2, 3, 256, 384)).astype(np.float32)
    network = CudaNetwork(pack.detection.path, [(1, 3, 256, 256)], photos[:1, :, :, :256], HERE)
    for here, there in zip(network.run(photos), OnnxNetwork(pack.detection.path).run(photos), strict=True):
        assert here.shape == there.shape
        assert cosines(here.reshape(2, -1), there.reshape(2, -1)).min() > 0.999


def test_boxes_match_the_cpu_within_half_a_pixel(pack: ModelPack, group: NDArray[np.uint8]) -> None:
    probe = np.random.default_rng(1).uniform(-1, 1, (1, 3, 256, 256)).astype(np.float32)
    shapes = [(n, 3, h, w) for n in (1, 2) for h in (256, 512) for w in (256, 640)]
    there = Detector(CudaNetwork(pack.detection.path, shapes, probe, HERE), pack.detection)
    here = Detector(OnnxNetwork(pack.detection.path), pack.detection)
    (found,), (wanted,) = there.detect([group]), here.detect([group])
    assert len(found) == len(wanted) == 6
    assert np.abs(found.boxes_xyxy - wanted.boxes_xyxy).max() < 0.5


def test_networks_that_overflow_fp16_run_in_fp32(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The factors 1e-9 and 1e9 are outside the range of fp16, 6e-8 to 65504."""
    small, large = ([v, 1.0] for v in (1e-9, 1e9))
    constants = [helper.make_tensor(n, TensorProto.FLOAT, [2], v) for n, v in (("small", small), ("large", large))]
    nodes = [helper.make_node("Mul", ["x", "small"], ["y"]), helper.make_node("Mul", ["y", "large"], ["z"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xz"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "x.onnx")
    network = CudaNetwork(tmp_path / "x.onnx", [(1, 2)], np.ones((1, 2), np.float32), HERE)
    assert network.precision == "fp32"
    assert "fp16 is not used" in caplog.text
    assert np.allclose(network.run(np.array([[3, 5]], np.float32))[0], [[3, 5]])


def test_outputs_without_a_batch_axis_are_kept_whole(tmp_path: Path, rng: np.random.Generator) -> None:
    photos = rng.random((2, 3, 2, 2)).astype(np.float32)
    network = CudaNetwork(flat_network(tmp_path / "flat.onnx"), [(1, 3, 2, 2)], photos[:1], HERE)
    assert np.allclose(network.run(photos)[0].reshape(2, 12), photos.reshape(2, 12), atol=1e-3)


def test_all_compute_nodes_run_on_the_device(pack: ModelPack) -> None:
    assert recognizer_on(pack).cpu_nodes == {}


def test_shape_arithmetic_does_not_count_as_compute(pack: ModelPack) -> None:
    """The detector computes output shapes on the CPU of every device."""
    network = OnnxNetwork(pack.detection.path)
    options = network.session_options()
    ran = profile_nodes(
        options, lambda: network.open_session(network.providers, options), np.zeros((1, 3, 256, 256), np.float32)
    )
    assert {"Shape", "Squeeze"} <= {node.operator for node in ran if not node.computes}
    assert "Sigmoid" in {node.operator for node in ran if node.computes}
    assert not {"Shape", "Squeeze"} & {node.operator for node in ran if node.computes}


@pytest.mark.skipif(HERE.kind == "cuda", reason="this machine has a GPU")
def test_cuda_without_a_gpu_reports_the_missing_part(pack: ModelPack) -> None:
    """The GPU build of onnxruntime itself would fall back to the CPU silently."""
    probe = np.zeros((1, *CROP), np.float32)
    with pytest.raises(RuntimeUnavailableError) as caught:
        CudaNetwork(pack.recognition.path, [(1, *CROP)], probe, Device("cuda", 0))
    assert str(caught.value) == diagnose_cuda()
    assert visible_gpus() == []
    wanted = (
        "no NVIDIA driver is installed" if CUDA in available_providers() else "has no CUDA: uninstall every onnxruntime"
    )
    assert wanted in str(caught.value)


def test_all_device_failures_raise_one_error_type(pack: ModelPack) -> None:
    """The caller catches this type to fall back to the CPU."""
    with pytest.raises(RuntimeUnavailableError, match="InvalidArgument"):
        CudaNetwork(pack.recognition.path, [(1, 3, 56, 56)], np.zeros((1, 3, 56, 56), np.float32), HERE)
