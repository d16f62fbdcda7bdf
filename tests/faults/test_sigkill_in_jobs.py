"""A server is killed repeatedly while it enrolls an archive. Each photo is processed once, and the result equals that
of an uninterrupted server.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kith import FileStream
from service.storage.repositories.jobs import JobStore
from tests.conftest import jpeg
from tests.faults import LONG
from tests.faults.killing import pause
from tests.faults.servers import serving
from tests.faults.tally import Tally
from tests.faults.workers import Node
from tests.postgres import DatabaseUrl
from tests.soundness import problems

pytestmark = pytest.mark.long

PHOTOS = 200
KILLS = 6


@pytest.mark.skipif(
    not LONG, reason="make test-faults; tests/service/usecases/test_bulk_enrollment.py has one kill of it"
)
def test_an_archive_is_enrolled_as_if_no_server_had_been_killed(
    some_database_url: DatabaseUrl, tmp_path: Path, astronaut: NDArray[np.uint8], tally: Tally
) -> None:
    archive, rng = tmp_path / "people.tar", np.random.default_rng(1)
    with tarfile.open(archive, "w") as file:
        for i in range(PHOTOS):
            photo = jpeg((astronaut * rng.uniform(0.4, 1, 3)).astype(np.uint8))
            entry = tarfile.TarInfo(f"s{i % 40}/{i}.jpg")
            entry.size = len(photo)
            file.addfile(entry, io.BytesIO(photo))
    ends = []
    for kills in (0, KILLS):
        url = some_database_url()
        with serving(tmp_path / f"{kills}-kills", url) as (server,), server.client(attempts=4) as kith:
            kith.create_gallery("g")
            job = kith.enroll_archive("g", FileStream(archive), face="largest", allow_duplicate=True)
            for _ in range(kills):
                pause(rng.uniform(0, 2.0))
                server.kill()
                tally.kills["bulk enrollment"] += is_unfinished(url, job.id)
                server.launch()
                server.wait_until_ready()
            ended = kith.wait_for(job.id, 300)
            assert (ended.state, ended.done_count, ended.failed_count) == ("succeeded", PHOTOS, 0)
        with tally.judging(), Node(url) as node:
            # Grouped by person: template ids are hashes keyed by the gallery.
            ends.append(sorted(node.templates("g").values()))
            assert len(ends[-1]) == PHOTOS
            assert problems(url) == []
    assert ends[0] == ends[1]


def is_unfinished(url: str, job_id: str) -> bool:
    with Node(url) as node:
        return bool(JobStore(node.database).unfinished([job_id]))
