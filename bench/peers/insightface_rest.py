"""InsightFace-REST on the same ONNX files, from a checkout of github.com/SthPhoenix/InsightFace-REST.

The environment's KITH_INSIGHTFACE_REST names the checkout, which has a virtual environment with its requirements and
onnxruntime in .venv. It runs one process: on two cores, two processes answered 30 to 45 % fewer photos.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.load import post
from bench.servers import Running, started
from tests.faults.servers import free_port

DETECTOR, RECOGNIZER = "scrfd_2.5g_bnkps", "w600k_mbf"
"""Models of its list whose pre- and postprocessing fit any SCRFD and any recognizer of this project."""
SETTINGS: Final = {
    "INFERENCE_BACKEND": "onnx",
    "DET_NAME": DETECTOR,
    "REC_NAME": RECOGNIZER,
    "GA_NAME": "",
    "MASK_DETECTOR": "",
    "MAX_SIZE": "640,640",
    "LOG_LEVEL": "ERROR",
}


def checkout() -> Path | None:
    """Return the checkout, if there is one."""
    folder = os.environ.get("KITH_INSIGHTFACE_REST")
    return None if folder is None else Path(folder)


@contextmanager
def insightface_rest(source: Path, pack: Path) -> Iterator[Running]:
    """Start the server on the networks of a pack."""
    port = free_port()
    with TemporaryDirectory() as folder:
        known = json.loads((source / "models" / "models.json").read_text(encoding="utf-8"))
        for name, file in ((DETECTOR, "detector.onnx"), (RECOGNIZER, "recognizer.onnx")):
            target = Path(folder, "onnx", name, f"{name}.onnx")
            target.parent.mkdir(parents=True)
            shutil.copy(pack / file, target)
            known[name] |= {"md5": None, "reshape": False}
        Path(folder, "models.json").write_text(json.dumps(known), encoding="utf-8")
        command = [str(source / ".venv" / "bin" / "python"), "-W", "ignore", "-m", "uvicorn", "if_rest.api.main:app"]
        command += ["--app-dir", str(source), "--port", str(port), "--log-level", "error", "--no-access-log"]
        with started(command, {**SETTINGS, "MODELS_DIR": folder}, port, "/docs") as running:
            yield running


def request(photo: bytes) -> bytes:
    """Build a complete POST request with one photo."""
    body = json.dumps({"images": {"data": [base64.b64encode(photo).decode()]}}).encode()
    return post("/extract", "application/json\r\nAccept: application/json", body)
