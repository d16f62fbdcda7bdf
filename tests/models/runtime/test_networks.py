"""Networks of every engine give each row its own result, in any batch and thread; none sends telemetry."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, load_model_from_string, numpy_helper

from models.errors import RuntimeUnavailableError
from models.pack.loading import BUNDLED_PACK
from models.pack.manifest import ModelPack
from models.runtime import cuda_network, openvino_network
from models.runtime.cuda_network import CUDA, CudaNetwork, Device, convert_to_fp16, diagnose_cuda, visible_gpus
from models.runtime.network import Float, Network
from models.runtime.onnx_files import finalize_onnx
from models.runtime.onnx_runtime import (
    BATCH_BUCKETS,
    OnnxNetwork,
    available_providers,
    choose_bucket,
    profile_nodes,
    split_batch,
)
from models.runtime.openvino_network import OpenVinoNetwork, fast_precisions, supported_precisions
from models.vision.alignment import align
from models.vision.detection import Detector
from models.vision.recognition import Recognizer
from tests.networks import color_network, flat_network, network

HERE = Device("cuda") if CUDA in available_providers() and visible_gpus() else Device("cpu")
"""Without a GPU, the code for GPUs runs on the CPU."""
CROP = (3, 112, 112)
SIDE = 2


def images(rng: np.random.Generator, count: int, side: int = SIDE) -> Float:
    """Return (count, 3, side, side) images of one color each."""
    return np.tile(rng.uniform(-1, 1, (count, 3, 1, 1)).astype(np.float32), (1, 1, side, side))


def on_gpu(path: Path, half: bool = True, sizes: Sequence[int] = (1, 2, 4)) -> CudaNetwork:
    shapes = [(count, 3, SIDE, SIDE) for count in sizes]
    return CudaNetwork(path, shapes, images(np.random.default_rng(1), 1), HERE, half)


@pytest.fixture
def colors(tmp_path: Path) -> Path:
    return color_network(tmp_path / "colors.onnx", ("batch", 3, "height", "width"))


NETWORKS: dict[str, Callable[[Path], Network]] = {
    "onnxruntime": OnnxNetwork,
    "OpenVINO": OpenVinoNetwork,
    "OpenVINO, two streams": partial(OpenVinoNetwork, streams=2),
    "GPU": on_gpu,
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_each_row_has_its_own_result_in_any_batch_and_thread(kind: str, colors: Path, rng: np.random.Generator) -> None:
    """Of all sizes, prepared and not. Results are copies, which later runs do not overwrite."""
    batches = [images(rng, count) for count in (37, 9, 3, *([1, 2, 3, 4] * 60))] + [images(rng, 2, 7)]
    for batch in batches:
        batch.setflags(write=False)
    opened = NETWORKS[kind](colors)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(opened.run, batches))
    _, weights = map(numpy_helper.to_array, onnx.load(colors).graph.initializer)
    for batch, (vectors,) in zip(batches, found, strict=True):
        np.testing.assert_allclose(vectors, batch[:, :, 0, 0] @ weights, atol=0.02)


@pytest.mark.parametrize("kind", NETWORKS)
def test_outputs_without_a_batch_axis_are_kept_whole(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """SCRFD exports of InsightFace return (n, k)."""
    photos = rng.random((2, 3, 2, 2)).astype(np.float32)
    opened = partial(on_gpu, sizes=[1]) if kind == "GPU" else NETWORKS[kind]
    first, _ = opened(flat_network(tmp_path / "flat.onnx")).run(photos)
    assert np.allclose(first.reshape(2, 12), photos.reshape(2, 12), atol=1e-3)


def rounded(pack: ModelPack, by: str) -> tuple[Network, Network]:
    """Return the bundled detector and recognizer in half precision."""
    if by == "OpenVINO":
        return OpenVinoNetwork(pack.detection.path, "bf16"), OpenVinoNetwork(pack.recognition.path, "bf16")
    shapes = [(n, 3, h, w) for n in (1, 2) for h in (256, 512) for w in (256, 640)]
    probes = [np.random.default_rng(1).uniform(-1, 1, (1, 3, side, side)).astype(np.float32) for side in (256, 112)]
    return (
        CudaNetwork(pack.detection.path, shapes, probes[0], HERE),
        CudaNetwork(pack.recognition.path, [(4, *CROP), (1, *CROP)], probes[1], HERE),
    )


@pytest.mark.parametrize(
    ("by", "most_px"),
    [
        ("GPU", 0.5),
        pytest.param(
            "OpenVINO",
            5.0,  # rounding may select another of two equal cells
            marks=pytest.mark.skipif("bf16" not in supported_precisions(), reason="this processor has no bf16"),
        ),
    ],
)
def test_half_precision_keeps_boxes_and_embeddings(
    by: str, most_px: float, pack: ModelPack, group: NDArray[np.uint8]
) -> None:
    networks, paths = rounded(pack, by), (pack.detection.path, pack.recognition.path)
    (wanted,), (found,) = (
        Detector(network, pack.detection).detect([group]) for network in (OnnxNetwork(paths[0]), networks[0])
    )
    assert len(found) == len(wanted) == 6
    moves = np.abs(np.sort(found.boxes_xyxy, axis=0) - np.sort(wanted.boxes_xyxy, axis=0)).max(1)
    assert np.median(moves) < 0.5 and moves.max() < most_px
    crops = align(group, wanted.landmarks_xy)
    before, after = (
        Recognizer(network, pack.recognition).embed(crops) for network in (OnnxNetwork(paths[1]), networks[1])
    )
    assert (before * after).sum(1).min() >= 0.998
    precision = "fp16" if by == "GPU" else "bf16"
    assert [network.precision for network in networks] == [precision] * 2
    if isinstance(networks[1], OpenVinoNetwork):
        assert networks[1].placement(np.zeros((1, *CROP), np.float32))["OpenVINO bf16"] > 10


def test_a_process_that_runs_networks_sends_and_writes_nothing_and_can_be_stopped(tmp_path: Path) -> None:
    """onnxruntime writes telemetry to the home directory by default; OpenVINO's model converter reports every import.

    OpenVINO replaces the signal stack: a server that closed networks in the order of their opening must still stop.
    """
    script = (
        "import gc, os, signal, socket, sys\nimport numpy as np\nfrom pathlib import Path\n"
        "def refuse(*a): raise SystemExit('network access')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from models.runtime.onnx_runtime import OnnxNetwork, available_cores\n"
        "from models.runtime.openvino_network import OpenVinoNetwork\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('stopped'))\n"
        f"path = Path({str(BUNDLED_PACK / 'recognizer.onnx')!r})\n"
        "networks = [kind(path) for kind in (OpenVinoNetwork, OpenVinoNetwork, OnnxNetwork)]\n"
        "for network in networks: network.run(np.zeros((1, 3, 112, 112), np.float32))\n"
        "assert 'openvino_telemetry' not in sys.modules\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "assert available_cores() == 1\n"
        "del network\n"
        "while networks: networks.pop(0), gc.collect()\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    # CI=true would disable the telemetry.
    dropped = ("CI", "ORT_DISABLE_TELEMETRY")
    environment = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("XDG_")}
    environment |= {"HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-X", "faulthandler", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr
    assert not list(tmp_path.rglob("*"))


# onnxruntime


def test_batches_are_split_without_padding() -> None:
    assert [choose_bucket(n) for n in (1, 2, 3, 9, 32, 33)] == [1, 2, 4, 16, 32, 32]

    def lengths(count: int, sizes: tuple[int, ...] = BATCH_BUCKETS) -> list[int]:
        return [rows.stop - rows.start for rows in split_batch(count, sizes)]

    assert (lengths(7), lengths(69), lengths(0)) == ([4, 2, 1], [32, 32, 4, 1], [])
    assert (lengths(5, (1, 4)), lengths(7, (3,))) == ([4, 1], [3, 3, 1])


def test_a_missing_provider_is_not_replaced_silently(colors: Path) -> None:
    with pytest.raises(RuntimeUnavailableError, match="OtherExecutionProvider"):
        OnnxNetwork(colors, "OtherExecutionProvider")


@pytest.mark.parametrize("slopes", [[-0.6], [0.2, -1.5]], ids=["one slope", "a slope a channel"])
def test_an_activation_of_one_slope_becomes_one_that_is_fused(
    slopes: list[float], tmp_path: Path, rng: np.random.Generator
) -> None:
    source, target, ends = tmp_path / "source.onnx", tmp_path / "target.onnx", ["float[1, 2, 3, 3] input"]
    nodes = ("middle = PRelu (input, slope)", "output = PRelu (middle, slope)")
    slope = np.array(slopes, np.float32).reshape(-1, 1, 1)
    network(source, ends, [ends[0].replace("input", "output")], *nodes, slope=slope)
    finalize_onnx(source, target, {})
    written = onnx.load(target).graph
    fused = len(slopes) == 1
    assert {node.op_type for node in written.node} == {"LeakyRelu" if fused else "PRelu"}
    assert len(written.initializer) == (0 if fused else 1)
    x = rng.normal(size=(1, 2, 3, 3)).astype(np.float32)
    np.testing.assert_allclose(OnnxNetwork(target).run(x)[0], OnnxNetwork(source).run(x)[0], rtol=1e-6)


# OpenVINO


def test_a_large_network_is_compiled_once_for_all_shapes(
    colors: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(openvino_network, "LARGE_FILE_BYTES", 1)
    network = OpenVinoNetwork(colors)
    for shape in ((1, 3, 8, 8), (5, 3, 8, 16), (2, 3, 16, 8)):
        canvases = rng.uniform(-1, 1, shape).astype(np.float32)
        np.testing.assert_allclose(network.run(canvases)[0], OnnxNetwork(colors).run(canvases)[0], atol=1e-3)
    assert len(network._compiled) == 1


def test_what_is_fast_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO reports INT8 on every processor, and bf16 on some that need 1.7 times longer for it."""
    monkeypatch.setattr(openvino_network, "supported_precisions", lambda: frozenset({"fp32", "bf16", "int8"}))
    for precision in ("int8", "bf16"):
        for has in (True, False):
            monkeypatch.setattr(openvino_network, f"has_fast_{precision}", lambda has=has: has)
            assert (precision in fast_precisions()) == has


# GPUs


def test_a_session_meets_one_shape(colors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime makes new plans of cuDNN whenever the shape of a session changes, which took 3 to 5 s on an H100."""
    bound: list[tuple[int, tuple[int, ...]]] = []
    run = cuda_network._run_bound

    def record(prepared: Any) -> list[Float]:
        bound.append((id(prepared.session), prepared.staging.shape))
        return run(prepared)

    monkeypatch.setattr(cuda_network, "_run_bound", record)
    network = on_gpu(colors)
    for count in (1, 4, 2, 1, 7, 4):
        network.run(np.zeros((count, 3, SIDE, SIDE), np.float32))
    assert {shape for _, shape in bound} == {(count, 3, SIDE, SIDE) for count in (1, 2, 4)}
    assert len(bound) == 3 + 7
    assert len(set(bound)) == len({session for session, _ in bound}) == 3
    assert network.cpu_nodes == {}


def test_weights_and_arithmetic_are_fp16_and_the_ends_fp32(pack: ModelPack, colors: Path) -> None:
    assert on_gpu(colors, half=False).precision == "fp32"
    made = load_model_from_string(convert_to_fp16(pack.recognition.path))
    assert {t.data_type for t in made.graph.initializer if len(t.dims) > 1} <= {TensorProto.FLOAT16, TensorProto.INT64}
    ends = [*made.graph.input, *made.graph.output]
    assert {end.type.tensor_type.elem_type for end in ends} == {TensorProto.FLOAT}


def test_networks_that_overflow_fp16_run_in_fp32(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The factors 1e-9 and 1e9 are outside the range of fp16, 6e-8 to 65504."""
    small, large = (np.array([factor, 1], np.float32) for factor in (1e-9, 1e9))
    nodes = ("y = Mul (x, small)", "z = Mul (y, large)")
    path = network(tmp_path / "x.onnx", ["float[n, 2] x"], ["float[n, 2] z"], *nodes, small=small, large=large)
    opened = CudaNetwork(path, [(1, 2)], np.ones((1, 2), np.float32), HERE)
    assert opened.precision == "fp32"
    assert "fp16 is not used" in caplog.text
    assert np.allclose(opened.run(np.array([[3, 5]], np.float32))[0], [[3, 5]])


def test_shape_arithmetic_does_not_count_as_compute(pack: ModelPack) -> None:
    """The detector computes output shapes on the CPU of every device."""
    network = OnnxNetwork(pack.detection.path)
    options = network.session_options()
    photo = np.zeros((1, 3, 256, 256), np.float32)
    ran = profile_nodes(options, lambda: network.open_session(network.providers, options), photo)
    computing = {node.operator for node in ran if node.computes}
    assert {"Shape", "Squeeze"} <= {node.operator for node in ran} - computing
    assert "Sigmoid" in computing


@pytest.mark.skipif(HERE.kind == "cuda", reason="this machine has a GPU")
def test_cuda_without_a_gpu_does_not_run_on_the_cpu(pack: ModelPack) -> None:
    """onnxruntime itself would, silently."""
    with pytest.raises(RuntimeUnavailableError):
        CudaNetwork(pack.recognition.path, [(1, *CROP)], np.zeros((1, *CROP), np.float32), Device("cuda", 0))
    missing = "no NVIDIA driver is installed" if CUDA in available_providers() else "has no CUDA: uninstall every"
    assert missing in str(diagnose_cuda())


def test_all_device_failures_raise_one_error_type(pack: ModelPack) -> None:
    """The caller catches this type to fall back to the CPU."""
    with pytest.raises(RuntimeUnavailableError, match="InvalidArgument"):
        CudaNetwork(pack.recognition.path, [(1, 3, 56, 56)], np.zeros((1, 3, 56, 56), np.float32), HERE)
