"""A fault of a device, of memory or of a disk is not the outcome of a photo."""

from __future__ import annotations

import errno
import io
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from models.runtime.network import Float
from models.vision import recognition
from models.vision.detection import Detector
from models.vision.pixels import to_planes
from service.core.errors import RefusedError
from service.inference.archives import iterate_members, read_contents
from service.jobs import runner
from tests.conftest import jpeg
from tests.service.cli.conftest import Program, written
from tests.service.usecases.test_bulk_enrollment import KINDS, LIMITS, Bytes, as_tar

PHOTOS = 6


@pytest.fixture
def photos(astronaut: NDArray[np.uint8]) -> dict[str, bytes]:
    face = jpeg(astronaut[:300, 90:360])
    return {f"eileen/{number}.jpg": face + number.to_bytes(2) for number in range(PHOTOS)}


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error 700"), RefusedError("gpu_unavailable", "lost")])
def test_a_fault_that_ends_costs_no_photo(
    kith: Kith, gallery: str, photos: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    prepare, batches = to_planes, itertools.count(1)

    def fail_at_first(*arguments: Any) -> Float:
        # An attempt runs one batch or more, and the fifth is the last.
        if threading.current_thread().name.startswith("device-") and next(batches) < 5:
            raise error
        return prepare(*arguments)

    monkeypatch.setattr(recognition, "to_planes", fail_at_first)
    job = kith.wait_for(kith.enroll_archive(gallery, Bytes(as_tar(photos))).id, 60)
    assert (job.state, job.failed_count, job.counts) == ("succeeded", 0, {"enrolled": PHOTOS})
    assert kith.gallery(gallery).template_count == PHOTOS


def test_a_fault_that_stays_stops_the_job_and_refuses_no_photo(
    kith: Kith, gallery: str, server: str, photos: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One photo always fails: the command names its position, and the photos before it stay."""
    prepare, run = Detector.place_on_canvas, Program(tmp_path, server)
    marked = np.full((40, 60, 3), 77, np.uint8)

    def fail_on_marked(self: Detector, small: NDArray[np.uint8], *rest: Any) -> Any:
        if small.mean() == 77:
            raise RuntimeError("a secret of eileen")
        return prepare(self, small, *rest)

    monkeypatch.setattr(Detector, "place_on_canvas", fail_on_marked)
    monkeypatch.setattr(runner, "MAX_ATTEMPTS", 2)
    written(tmp_path / "people", photos | {"eileen/5.jpg": jpeg(marked), "tom/1.jpg": photos["eileen/5.jpg"]})
    words = ("enroll", "people", "-g", gallery, "--report", "report.ndjson")
    run(*words, status=3)
    for said in ("(job_crashed)", "photo 6 of the archive", "run the command again to resume"):
        assert said in run.stderr
    assert "eileen" not in run.stderr  # an erasure would not find the name in the job's problem
    (job,) = kith.jobs(gallery)
    assert (job.state, job.failed_count, job.counts) == ("failed", 0, {"enrolled": 5})
    lines = (tmp_path / "report.ndjson").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["done"] * 5
    # The archive is sent again when the device works.
    monkeypatch.setattr(Detector, "place_on_canvas", prepare)
    again = json.loads(run(*words, "--json", status=1))
    assert (again["already_enrolled_count"], again["enrolled_count"]) == (5, 0)
    assert {row["code"] for row in again["refused"]} == {"no_face", "duplicate_subject"}


class FailingDisk(io.BytesIO):
    """Archive on a disk that fails from a byte on."""

    def __init__(self, payload: bytes, readable: int) -> None:
        super().__init__(payload)
        self._payload, self._readable = payload, readable

    def read(self, size: int | None = -1, /) -> bytes:
        block = super().read(size)
        if self.tell() > self._readable:
            raise OSError(errno.EIO, "Input/output error")
        return block

    def open(self, _mode: str, /) -> IO[bytes]:
        return FailingDisk(self._payload, self._readable)


@pytest.mark.parametrize("pack", KINDS[:3])
def test_a_disk_that_fails_is_not_a_damaged_archive(
    pack: Callable[[dict[str, bytes]], bytes], rng: np.random.Generator
) -> None:
    payload, failures = pack({f"ada/{number}.jpg": rng.bytes(30_000) for number in range(4)}), 0
    readers: tuple[Callable[[FailingDisk], object], ...] = (
        lambda archive: read_contents(archive, LIMITS, None, lambda: None),
        lambda archive: [member.read() for member in iterate_members(archive, LIMITS)],
    )
    for readable in range(0, len(payload), 10_000):
        for read in readers:
            try:
                read(FailingDisk(payload, readable))
            except OSError as error:
                assert error.errno == errno.EIO
                failures += 1
    assert failures > 5
