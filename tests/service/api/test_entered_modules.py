"""How many modules one photo's identify enters, recorded on a running server.

Their number may only get smaller: each module that a photo passes through costs its readers one more file.
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

MAX_ENTERED = 42
REPEATS = 5
"""Threads in the background enter modules now and then: a request enters those of each repeated one."""


def test_a_photo_s_identify_enters_no_further_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, astronaut: NDArray[np.uint8]
) -> None:
    entered, is_recording = set[str](), threading.Event()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and is_recording.is_set():
            entered.add(frame.f_globals.get("__name__", ""))

    # Of threads that start from now on, as by threading.setprofile.
    monkeypatch.setattr(threading, "_profile_hook", note)
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
    assert len(always) <= MAX_ENTERED, sorted(always)
