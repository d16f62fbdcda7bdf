"""Stored and open files of a service contain no name, vector or photo, however the service ended.

A control test runs the same work without encryption, and must find all of it.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith, KithClientError
from models.vision.recognition import l2_normalize
from service.security.master_keys import new_key_text
from tests.conftest import jpeg
from tests.faults import LONG
from tests.faults.killing import pause
from tests.faults.servers import Server
from tests.packs import BUNDLED_DIMENSION
from tests.service.security.disk_search import (
    Needles,
    forms_of_bytes,
    forms_of_text,
    forms_of_vector,
    found_in,
)

pytestmark = pytest.mark.long

OPERATOR = "operator-token-of-this-test-quagga"
NAME, OTHER_NAME = "Ægir Žižek-Numbat", "Thomas Axolotl-Xq"
ADA, TOM, DELETED, ABSENT = "ada-okapi-7f3", "tom-pangolin-51", "gone-dugong-8", "absent-fossa-66"
BULK, BROKEN, FOLDER = "tapir-5521.jpg", "ibex-broken-91.jpg", "person-lemur-404"
MARGAY = "Margay Line-Person"
TEXTS = {
    "name": [NAME, OTHER_NAME],
    "id": [ADA, TOM, DELETED, ABSENT],
    "tag": ["tag-quokka-zz"],
    "metadata": ["badge-wombat-991", "Department of Echidnas"],
    "item": [BULK, BROKEN, FOLDER],
    "NDJSON": [MARGAY],
    "idempotency key": ["idem-narwhal-0017"],
}
IN_CLEAR = {"name", "id", "tag", "metadata", "item", "NDJSON", "vector", "photo", "crop"}
"""Secrets that an unencrypted service leaves. Idempotency keys and API keys are stored only as hashes."""


class Watched(Server):
    """Server whose files all lie in one folder: data, temporary files, caches, log."""

    def __init__(self, folder: Path, program: list[str], master_key: str, url: str | None) -> None:
        self.folder, self._program = folder, program
        for name in ("tmp", "home", "data"):
            (folder / name).mkdir(parents=True)
        super().__init__(
            folder / "data",
            url,
            TMPDIR=str(folder / "tmp"),
            HOME=str(folder / "home"),
            KITH_MASTER_KEY=master_key,
            KITH_API_KEY=OPERATOR,
            PYTHONPATH=os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]),
        )

    def launch(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._program, "serve"],
                env=self._environment | {"KITH_LOG_LEVEL": "DEBUG"},
                stdout=log,
                stderr=log,
                cwd=self.folder / "home",
            )

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(60) == -signal.SIGTERM  # uvicorn re-raises the signal after a graceful stop
        assert b"Application shutdown complete" in (self.folder / "log").read_bytes()

    def client(self, attempts: int = 1) -> Kith:
        return Kith(self.url, OPERATOR, attempts=attempts)


@contextmanager
def watched(folder: Path, program: list[str], master_key: str, url: str | None = None) -> Iterator[Watched]:
    server = Watched(folder, program, master_key, url)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


def work(server: Watched, photo: bytes, other: bytes, nobody: bytes) -> dict[str, list[bytes]]:
    """Run every operation of a gallery; return the secrets to search for."""
    with server.client() as kith:
        token = kith.create_key("for the test", ["read"]).token
        kith.create_gallery("people", keep_crops=True)
        embedded = kith.embed(photo, other)
        vectors = [np.array(result.faces[0].embedding, np.float32) for result in embedded.images]
        kith.put_subject("people", ADA, NAME, {"badge": "badge-wombat-991"}, ["tag-quokka-zz"])
        kith.enroll("people", ADA, photo, idempotency_key="idem-narwhal-0017")
        kith.put_subject("people", TOM, OTHER_NAME, {"of": "Department of Echidnas"})
        kith.enroll("people", TOM, other)
        assert kith.verify(("people", ADA), photo).outcome == "same"
        kith.identify("people", photo, filter={"tags": ["tag-quokka-zz"]})
        kith.identify("people", embeddings=[vectors[1]])
        with pytest.raises(KithClientError, match="subject_not_found"):
            kith.subject("people", ABSENT)
        with pytest.raises(KithClientError, match="duplicate_subject"):
            kith.enroll("people", ABSENT, photo)
        with pytest.raises(KithClientError, match="no_face"):
            kith.enroll("people", ADA, nobody)
        strangers = l2_normalize(np.random.default_rng(17).normal(size=(2, BUNDLED_DIMENSION))).astype(np.float32)
        kith.enroll("people", DELETED, embeddings=[strangers[0]])
        kith.delete_subject("people", DELETED)
        lines = [
            {"subject": "imported-line", "name": MARGAY, "embedding": strangers[1].tolist()},
            {"subject": "imported-line", "name": MARGAY, "embedding": [1.0], "template": "x"},
        ]
        recognizer = kith.gallery("people").recognizer
        send(server, recognizer, "\n".join(map(json.dumps, lines)).encode())
        done = kith.wait_for(kith.enroll_archive("people", archive(server.folder, photo, 1)).id)
        assert {item.item.partition("/")[2] for item in kith.job_items(done.id)} == {BULK, BROKEN}
        exported = b"".join(kith.export_gallery("people", crops=True))
        crops = [json.loads(line).get("crop") for line in exported.splitlines()]
    images = [base64.b64decode(crop) for crop in crops if crop]
    assert images
    needles = {kind: [form for text in texts for form in forms_of_text(text)] for kind, texts in TEXTS.items()}
    needles["vector"] = [form for vector in (*vectors, *strangers) for form in forms_of_vector(vector)]
    needles["photo"] = [form for each in (photo, other) for form in forms_of_bytes(each)]
    needles["crop"] = [form for image in images for form in forms_of_bytes(image)]
    needles["key"] = [form for text in (token, token.rpartition("_")[2], OPERATOR) for form in forms_of_text(text)]
    return needles


def send(server: Watched, recognizer: str, body: bytes) -> None:
    headers = {"Authorization": f"Bearer {OPERATOR}", "Content-Type": "application/x-ndjson"}
    url = f"{server.url}/v1/galleries/people/import?recognizer={recognizer}"
    answer = httpx.post(url, content=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text


def archive(folder: Path, photo: bytes, count: int) -> Path:
    """Archive outside the searched folder."""
    path = folder.parent / f"{uuid.uuid4().hex}.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"{FOLDER}/{BROKEN}", photo[:1000])
        for number in range(count):
            packed.writestr(f"{FOLDER}/{f'{number}-' if number else ''}{BULK}", photo + bytes([number]))
    return path


def kill_at_work(server: Watched, photo: bytes) -> None:
    """Kill the server with jobs running and waiting."""
    with server.client() as kith:
        for _ in range(3):  # more than run concurrently
            kith.enroll_archive("people", archive(server.folder, photo, 20))
        while not list(kith.jobs("people", ["running"])):
            pause(0.02)
    server.kill()


def back_up(server: Watched, program: list[str]) -> None:
    arguments = [sys.executable, *program, "backup", str(server.folder / "data" / "backup")]
    subprocess.run(arguments, env=server._environment, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def photos(astronaut: NDArray[np.uint8], actor: NDArray[np.uint8], nobody: NDArray[np.uint8]) -> list[bytes]:
    return [jpeg(image) for image in (astronaut, actor, nobody)]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"] if LONG else ["sqlite"])
def test_files_contain_no_personal_data(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, photos: list[bytes]
) -> None:
    master_key, url, cluster = new_key_text(), None, None
    if kind == "postgresql":
        cluster = request.getfixturevalue("postgres")
        url = cluster.create(f"kith_{uuid.uuid4().hex}")
    with watched(tmp_path / "watched", ["-m", "service.cli.main"], master_key, url) as server:
        needles: Needles = work(server, *photos) | {"master key": forms_of_text(master_key)}
        back_up(server, ["-m", "service.cli.main"])
        kill_at_work(server, photos[0])
        names = {path.name for path in server.folder.rglob("*") if path.is_file()}
        assert {"backup", "log"} | (set() if cluster else {"kith.db", "kith.db-wal"}) <= names
        assert list((server.folder / "data" / "spool").iterdir())
        assert found_in(server.folder, needles) == {}

        server.launch()
        server.wait_until_ready()
        with server.client() as kith:
            kith.wait_for(next(kith.jobs("people")).id)
            assert kith.subject("people", ADA).name == NAME
        server.end()
        assert found_in(server.folder, needles) == {}
    if cluster is not None:
        cluster.stop("fast")
        try:
            assert found_in(cluster.folder, needles) == {}
        finally:
            cluster.start()


def test_an_unencrypted_service_leaves_all_of_it(tmp_path: Path, photos: list[bytes]) -> None:
    program = ["-m", "tests.service.security.unencrypted"]
    with watched(tmp_path / "watched", program, new_key_text()) as server:
        needles = work(server, *photos)
        back_up(server, program)
        kill_at_work(server, photos[0])
        found = found_in(server.folder, needles)
        assert found.keys() == IN_CLEAR
        assert any("spool" in name for name in found["photo"])
        assert all("data/backup" in found[kind] for kind in ("name", "vector", "crop"))
        assert not any("log" in names for names in found.values())
