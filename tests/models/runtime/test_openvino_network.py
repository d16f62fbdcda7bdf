"""OpenVINO matches onnxruntime in each precision and sends no telemetry."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime import openvino_network
from models.runtime.onnx_runtime import OnnxNetwork
from models.runtime.openvino_network import OpenVinoNetwork, fast_precisions, supported_precisions
from models.vision.alignment import align
from models.vision.detection import Detector
from models.vision.recognition import Recognizer

pytest.importorskip("openvino")
needs_bf16 = pytest.mark.skipif("bf16" not in supported_precisions(), reason="this processor does not multiply bf16")


def test_any_batch_size_gives_every_row(rng: np.random.Generator) -> None:
    crops = rng.standard_normal((19, 3, 112, 112)).astype(np.float32)
    network = OpenVinoNetwork(BUNDLED_PACK / "recognizer.onnx")
    whole = network.run(crops)[0]
    wanted = OnnxNetwork(BUNDLED_PACK / "recognizer.onnx").run(crops)[0]
    np.testing.assert_allclose(whole, wanted, atol=1e-3 * np.abs(wanted).max())
    kept = whole.copy()
    crops.setflags(write=False)
    network.run(crops[::-1])
    assert np.array_equal(whole, kept), "the next run overwrote a result"


def test_runs_at_once_have_their_own_results(rng: np.random.Generator) -> None:
    path = BUNDLED_PACK / "recognizer.onnx"
    crops = [rng.standard_normal((count, 3, 112, 112)).astype(np.float32) for count in (1, 4, 1, 3, 1, 4, 2, 1)]
    alone = OpenVinoNetwork(path)
    wanted = [alone.run(batch)[0] for batch in crops]
    shared = OpenVinoNetwork(path, streams=2)
    assert (alone.streams, shared.streams) == (1, 2)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda batch: shared.run(batch)[0], crops))
    for here, there in zip(found, wanted, strict=True):
        np.testing.assert_allclose(here, there, atol=1e-3 * np.abs(there).max())


def test_compiled_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_network, "MAX_COMPILED_SHAPES", 3)
    network = OpenVinoNetwork(BUNDLED_PACK / "detector.onnx")
    for side in range(1, 6):
        network.run(np.zeros((1, 3, 32, 32 * side), np.float32))
    assert len(network._compiled) == 3


def test_a_large_detector_is_compiled_once_for_all_canvases(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    path = BUNDLED_PACK / "detector.onnx"
    exact = OnnxNetwork(path)
    monkeypatch.setattr(openvino_network, "LARGE_FILE_BYTES", 1)
    network = OpenVinoNetwork(path)
    for shape in ((1, 3, 256, 256), (5, 3, 256, 384), (2, 3, 384, 256)):
        canvases = rng.uniform(-1, 1, shape).astype(np.float32)
        for here, wanted in zip(network.run(canvases), exact.run(canvases), strict=True):
            np.testing.assert_allclose(here, wanted, atol=1e-3 * np.abs(wanted).max())
    assert len(network._compiled) == 1


def test_what_is_fast_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO reports INT8 on every processor, and bf16 on some that need 1.7 times longer for it."""
    monkeypatch.setattr(openvino_network, "supported_precisions", lambda: frozenset({"fp32", "bf16", "int8"}))
    for precision in ("int8", "bf16"):
        for has in (True, False):
            monkeypatch.setattr(openvino_network, f"has_fast_{precision}", lambda has=has: has)
            assert (precision in fast_precisions()) == has


@needs_bf16
def test_bf16_keeps_boxes_and_embeddings(group: NDArray[np.uint8], astronaut: NDArray[np.uint8]) -> None:
    pack = load_pack(BUNDLED_PACK)
    photos = [group, astronaut]
    exact, rounded = (
        Detector(network, pack.detection).detect(photos)
        for network in (OnnxNetwork(pack.detection.path), OpenVinoNetwork(pack.detection.path, "bf16"))
    )
    crops = [align(photo, faces.landmarks_xy) for photo, faces in zip(photos, exact, strict=True)]
    moves = []
    for wanted, faces in zip(exact, rounded, strict=True):
        assert len(faces) == len(wanted) > 0
        left, right = (np.argsort(found.boxes_xyxy[:, 0]) for found in (wanted, faces))
        moves.append(np.abs(wanted.boxes_xyxy[left] - faces.boxes_xyxy[right]).max(1))
        # Rounding may select another of two equal cells, whose box differs slightly more.
        widths = wanted.boxes_xyxy[left, 2] - wanted.boxes_xyxy[left, 0]
        assert (moves[-1] < 0.05 * widths).all()
    assert np.median(np.concatenate(moves)) < 0.5
    before, after = (
        Recognizer(network, pack.recognition).embed(np.concatenate(crops))
        for network in (OnnxNetwork(pack.recognition.path), OpenVinoNetwork(pack.recognition.path, "bf16"))
    )
    assert (before * after).sum(1).min() >= 0.998


@needs_bf16
def test_placement_reports_the_precision_of_nodes() -> None:
    placed = OpenVinoNetwork(BUNDLED_PACK / "recognizer.onnx", "bf16").placement(np.zeros((1, 3, 112, 112), np.float32))
    assert placed["OpenVINO bf16"] > 10


def test_no_telemetry_is_written_or_sent(tmp_path: Path) -> None:
    """OpenVINO's model converter would report every import and store an id in the home directory."""
    script = (
        "import socket, sys\nimport numpy as np\nfrom pathlib import Path\n"
        "def refuse(*a): raise SystemExit('network access')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from models.runtime.openvino_network import OpenVinoNetwork\n"
        f"network = OpenVinoNetwork(Path({str(BUNDLED_PACK / 'recognizer.onnx')!r}))\n"
        "network.run(np.zeros((1, 3, 112, 112), np.float32))\n"
        "assert 'openvino_telemetry' not in sys.modules\n"
    )
    # CI=true would disable the telemetry.
    environment = {k: v for k, v in os.environ.items() if k != "CI" and not k.startswith("XDG_")}
    environment |= {"HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert not list(tmp_path.rglob("*"))


def test_signals_arrive_after_networks_were_closed_in_the_order_of_their_opening() -> None:
    """OpenVINO replaces the signal stack. A server that has replaced its recognizer must still stop on SIGTERM."""
    script = (
        "import gc, signal\nimport numpy as np\nfrom pathlib import Path\n"
        "from models.runtime.openvino_network import OpenVinoNetwork\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('stopped'))\n"
        f"networks = [OpenVinoNetwork(Path({str(BUNDLED_PACK / 'recognizer.onnx')!r})) for _ in range(2)]\n"
        "for network in networks: network.run(np.zeros((1, 3, 112, 112), np.float32))\n"
        "del network\n"
        "while networks: networks.pop(0), gc.collect()\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    command = [sys.executable, "-X", "faulthandler", "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "stopped\n"
