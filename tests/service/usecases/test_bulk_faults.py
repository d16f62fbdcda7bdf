"""A fault of a device, of memory or of a disk is not the outcome of a photo."""

from __future__ import annotations

import errno
import io
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
from service.core.errors import UnreadyError
from service.inference.archives import iterate_members, read_contents
from service.jobs import runner
from tests.commands import run_kith
from tests.conftest import jpeg
from tests.service.usecases.test_bulk_enrollment import KINDS, LIMITS, Bytes, as_tar

PHOTOS = 12


@pytest.fixture
def photos(astronaut: NDArray[np.uint8]) -> dict[str, bytes]:
    return {f"eileen/{number:02}.jpg": jpeg(astronaut) + number.to_bytes(2) for number in range(PHOTOS)}


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.05)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception, int], None]:
    """Let the recognizer fail for a number of batches, after the check at the start of a service."""
    prepare = to_planes

    def fail(error: Exception, batches: int) -> None:
        run = 0

        def prepare_or_fail(*arguments: Any) -> Float:
            nonlocal run
            run += threading.current_thread().name.startswith("device-")
            if 0 < run <= batches:
                raise error
            return prepare(*arguments)

        monkeypatch.setattr(recognition, "to_planes", prepare_or_fail)

    return fail


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error 700"), UnreadyError("gpu_unavailable", "lost"), MemoryError()]
)
def test_a_fault_that_ends_costs_no_photo(
    kith: Kith,
    gallery: str,
    photos: dict[str, bytes],
    fail: Callable[[Exception, int], None],
    error: Exception,
) -> None:
    fail(error, 4)  # an attempt runs one batch or more, and the fifth is the last
    job = kith.wait_for(kith.enroll_archive(gallery, Bytes(as_tar(photos))).id, 60)
    assert (job.state, job.failed_count, job.counts) == ("succeeded", 0, {"enrolled": PHOTOS})
    assert kith.gallery(gallery).template_count == PHOTOS


def test_a_fault_that_stays_stops_the_job_and_refuses_no_photo(
    kith: Kith, gallery: str, photos: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One photo always fails: the job names its position, and the photos before it stay."""
    prepare = Detector.place_on_canvas
    marked = np.full((40, 60, 3), 77, np.uint8)

    def fail_on_marked(self: Detector, small: NDArray[np.uint8], *rest: Any) -> Any:
        if small.mean() == 77:
            raise RuntimeError("a secret of eileen")
        return prepare(self, small, *rest)

    monkeypatch.setattr(Detector, "place_on_canvas", fail_on_marked)
    files = dict(list(photos.items())[:5]) | {"eileen/05.jpg": jpeg(marked)} | {"tom/1.jpg": photos["eileen/06.jpg"]}
    job = kith.wait_for(kith.enroll_archive(gallery, Bytes(as_tar(files))).id, 60)
    assert (job.state, job.failed_count, job.counts) == ("failed", 0, {"enrolled": 5})
    assert job.problem is not None
    assert job.problem.code == "job_crashed"
    assert job.problem.detail.startswith("photo 6 of the archive")
    assert "eileen" not in str(job.problem)  # an erasure would not find the name there
    # The archive is sent again when the device works.
    monkeypatch.setattr(Detector, "place_on_canvas", prepare)
    again = kith.wait_for(kith.enroll_archive(gallery, Bytes(as_tar(files))).id, 60)
    assert again.counts == {"already_enrolled": 5, "no_face": 1, "duplicate_subject": 1}


@pytest.mark.parametrize("is_local", [False, pytest.param(True, marks=pytest.mark.long)])
def test_kith_enroll_stops_and_resumes(
    tmp_path: Path, server: str, photos: dict[str, bytes], fail: Callable[[Exception, int], None], is_local: bool
) -> None:
    for name, payload in photos.items():
        (tmp_path / "people" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "people" / name).write_bytes(payload)
    words = ("enroll", "people", "-g", "resumed", "--report", "report.ndjson")
    environment = {"KITH_LOG_LEVEL": "ERROR"} | ({} if is_local else {"KITH_URL": server})
    for batches, status, rows in ((10_000, 3, []), (0, 0, ["done"] * PHOTOS)):
        fail(RuntimeError("CUDA error 700"), batches)
        done = run_kith(*words, cwd=tmp_path, environment=environment)
        assert done.returncode == status, done.stderr
        for said in ("(job_crashed)", "photo 1 of the archive", "run the command again to resume"):
            assert (said in done.stderr) == bool(batches)
        lines = (tmp_path / "report.ndjson").read_text().splitlines()
        assert [json.loads(line)["status"] for line in lines] == rows
    if not is_local:
        with Kith(server) as kith:
            kith.delete_gallery("resumed")


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
