"""On a full disk, writes fail with a clear error and no side effects, searches continue, and freed space restores
writes.
"""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kith import KithClientError
from models.vision.recognition import l2_normalize
from tests.faults.servers import serving
from tests.soundness import problems

pytestmark = pytest.mark.long

SIZE_MB = 40


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of SIZE_MB. Skips if mounting is not permitted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("no file system may be mounted here: run as root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fill the disk to the last byte."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return filler


def test_a_full_disk(small_disk: Path) -> None:
    rng, refused = np.random.default_rng(0), list[str]()
    enrolled: dict[str, np.ndarray] = {}

    def enroll(subject: str, count: int) -> None:
        vectors = l2_normalize(rng.normal(size=(count, dimension)))
        answer = kith.enroll("g", subject, embeddings=list(vectors), allow_duplicate=True, allow_inconsistent=True)
        assert answer.enrolled_count == count
        enrolled[subject] = vectors

    def check() -> None:
        """Check that listing and searching return exactly these subjects."""
        assert {s.id: s.template_count for s in kith.subjects("g")} == {s: len(v) for s, v in enrolled.items()}
        for subject, vectors in enrolled.items():
            (result,) = kith.identify("g", embeddings=[vectors.mean(0)], risk={"threshold": 0.99}).results
            assert result.subject == subject

    with serving(small_disk, None) as (server,), server.client() as kith:
        dimension = kith.model().dimension
        kith.create_gallery("g")
        for number in range(20):
            enroll(f"s{number}", 1)
        filler = fill(small_disk)
        while len(refused) < 5:  # free space inside the database's last pages may hold a few more
            try:
                enroll(f"t{len(enrolled)}", 16)
            except KithClientError as error:
                assert (error.status, error.code) == (507, "storage_full"), str(error)
                refused.append(error.code)
        check()
        assert server.readiness() == 200  # searches work
        filler.unlink()
        for subject in [*enrolled][:10]:
            assert kith.delete_subject("g", subject).subject_count == 1
            del enrolled[subject]
        enroll(f"t{len(enrolled)}", 1)
        check()
    assert problems(f"sqlite:///{small_disk / 'kith.db'}") == []
