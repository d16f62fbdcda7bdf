"""Two servers over one database. A subject erased through one is unknown to the other, to a running archive job, to
later exports, and after both servers were killed.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Risk
from tests.conftest import jpeg
from tests.faults import LONG
from tests.faults.servers import serving
from tests.postgres import DatabaseUrl
from tests.soundness import problems

pytestmark = pytest.mark.long

BEFORE = 40
"""Photos of other people that the archive job processes before the erased person's photo."""


@pytest.mark.skipif(
    not LONG, reason="make test-faults; tests/service/storage/privacy/test_erasure.py has the same in one process"
)
def test_an_erasure_reaches_every_server_job_and_export(
    some_database_url: DatabaseUrl,
    tmp_path: Path,
    astronaut: NDArray[np.uint8],
    actor: NDArray[np.uint8],
    capfd: pytest.CaptureFixture[str],
) -> None:
    url, photo, other = some_database_url(), jpeg(astronaut), jpeg(actor)
    with serving(tmp_path, url, url) as servers:
        here, there = (server.client(attempts=4) for server in servers)
        here.create_gallery("g", keep_crops=True)
        here.put_subject("g", "eileen", "Eileen Collins", {"born": 1956}, ["commander"])
        assert here.enroll("g", "eileen", photo).enrolled_count == 1
        assert here.enroll("g", "tom", other).enrolled_count == 1
        risk: Risk = {"threshold": 0.5}
        for kith in (here, there):
            (face,) = kith.identify("g", photo, risk=risk).results
            assert face.subject == "eileen"
        archive = tmp_path / "people.zip"
        archive.write_bytes(_archive(other, photo))
        job = there.enroll_archive("g", archive, allow_duplicate=True)

        receipt = here.delete_subject("g", "eileen").receipt
        assert receipt is not None
        for kith in (there, here):
            (face,) = kith.identify("g", photo, risk=risk).results
            assert face.subject != "eileen"
            assert [one.id for one in kith.erasures("g", "eileen")] == [receipt.id]
        ended = there.wait_for(job.id, 120)
        assert ended.counts.get("subject_erased") == 1, ended
        assert ended.counts.get("enrolled", 0) + ended.counts.get("already_enrolled", 0) == BEFORE
        assert {item.item for item in there.job_items(job.id, failed=True)} == {""}
        assert b"eileen" not in b"".join(there.export_gallery("g", crops=True)).lower()

        for server in servers:
            server.kill()
        for server in servers:
            server.launch()
            server.wait_until_ready()
        for kith in (here, there):
            (face,) = kith.identify("g", photo, risk=risk).results
            assert face.subject != "eileen"
            assert [s.id for s in kith.subjects("g")] == ["tom"]
            assert kith.delete_subject("g", "eileen").receipt.id == receipt.id
        # A later enrollment is a new decision by the operator.
        assert there.enroll("g", "eileen", photo).enrolled_count == 1
        (face,) = here.identify("g", photo, risk=risk).results
        assert face.subject == "eileen"
        for kith in (here, there):
            kith.close()
    assert problems(url, "g") == []
    said = capfd.readouterr()
    assert "eileen" not in (said.out + said.err).lower()


def _archive(others: bytes, erased: bytes) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for number in range(BEFORE):
            archive.writestr(f"tom/{number:02d}.jpg", others + number.to_bytes(2))
        archive.writestr("eileen/one.jpg", erased + b"\0")
    return held.getvalue()
