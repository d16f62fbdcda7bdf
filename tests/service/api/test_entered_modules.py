"""The modules that one photo's identify enters, recorded on a running server.

The list may only get shorter: each module that a photo passes through costs its readers one more file.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg

ENTERED = {
    "kith.wire.photos",
    "models.risk.calibration",
    "models.risk.impostor_evidence",
    "models.runtime.onnx_runtime",
    "models.vision.alignment",
    "models.vision.detection",
    "models.vision.face_search",
    "models.vision.photo_files",
    "models.vision.pixels",
    "models.vision.quality",
    "models.vision.recognition",
    "service.api.http.access",
    "service.api.http.bodies",
    "service.api.http.gate",
    "service.api.routes.identify",
    "service.core.actor",
    "service.core.deadlines",
    "service.index.faiss_structures",
    "service.index.follower",
    "service.index.segments",
    "service.inference.batcher",
    "service.inference.decoding",
    "service.inference.images",
    "service.inference.photo_pipeline",
    "service.inference.recognizers",
    "service.inference.scheduler",
    "service.observability.metrics",
    "service.risk.decision",
    "service.risk.drift",
    "service.risk.gallery_risks",
    "service.risk.search",
    "service.risk.threshold",
    "service.security.api_keys",
    "service.security.sealing",
    "service.storage.audit.log",
    "service.storage.audit.writer",
    "service.storage.db.engine",
    "service.storage.repositories.api_keys",
    "service.storage.repositories.read_cache",
    "service.usecases.backend",
    "service.usecases.documents",
    "service.usecases.identify",
}
REPEATS = 5
"""Threads in the background enter modules now and then: a request enters those of each repeated one."""


def test_a_photo_s_identify_enters_no_further_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, astronaut: NDArray[np.uint8]
) -> None:
    entered, is_recording = set[str](), threading.Event()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and is_recording.is_set():
            entered.add(frame.f_globals.get("__name__", ""))

    monkeypatch.setattr(
        threading, "_profile_hook", note
    )  # of threads that start from now on, as by threading.setprofile
    photo = jpeg(astronaut)
    with embedded(load_settings(data_dir=tmp_path, log_level="WARNING")) as url, Kith(url) as kith:
        kith.create_gallery("staff")
        kith.enroll("staff", "ada", photo)
        recorded = list[set[str]]()
        for _ in range(2 + REPEATS):
            entered.clear()
            is_recording.set()
            assert kith.identify("staff", photo).results[0].subject == "ada"
            is_recording.clear()
            own = {name for name in entered if name.startswith(("service.", "models.", "kith."))}
            recorded.append(own - {"service.core.periodic"})  # writes the audit at its own times
    always = set.intersection(*recorded[2:])
    ever = set.union(*recorded[2:])
    assert always <= ENTERED, f"identify enters further modules: {sorted(always - ENTERED)}"
    assert ever >= ENTERED, f"identify enters these no longer, so remove them: {sorted(ENTERED - ever)}"
