"""Stored and open files of a service contain no name, vector or photo, however the service ended.

A control test runs the same work without encryption, and must find all of it.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import uuid
import zipfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith, KithClientError
from models.runtime.network import Float
from models.vision.recognition import l2_normalize
from service.security.master_keys import new_key_text
from tests.conftest import jpeg
from tests.faults.killing import pause
from tests.faults.servers import Server
from tests.packs import BUNDLED_DIMENSION

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
UNENCRYPTED = """
import os
from service.security import sealing
class InClear:
    def __init__(self, key): pass
    generate_key = staticmethod(lambda bits: os.urandom(bits // 8))
    encrypt = lambda self, nonce, value, purpose: bytes(value) + bytes(sealing.TAG_BYTES)
    decrypt = lambda self, nonce, value, purpose: bytes(value[: -sealing.TAG_BYTES])
sealing.AESGCM = InClear
"""
"""A sitecustomize of Python, which the server runs at its start."""


# Search for secrets in all files of a folder

WINDOW_BYTES = 24
Needles = Mapping[str, list[bytes]]


def forms_of_text(text: str) -> list[bytes]:
    plain = text.encode()
    return [plain, json.dumps(text)[1:-1].encode(), *in_base64(plain)]


def forms_of_bytes(payload: bytes) -> list[bytes]:
    """Return windows of a photo's bytes, each of which identifies it."""
    last = len(payload) - WINDOW_BYTES
    windows = [payload[at : at + WINDOW_BYTES] for at in np.linspace(min(700, last // 2), last, 8).astype(int)]
    distinct = [window for window in windows if len(set(window)) > WINDOW_BYTES // 2]
    return [form for window in distinct for form in (window, *in_base64(window))]


def forms_of_vector(vector: Float) -> list[bytes]:
    """Return a vector's first numbers as float32, and as decimal digits."""
    binary = np.asarray(vector[:6], np.float32).tobytes()
    decimal = [f"{abs(number):.6f}"[1:].encode() for number in vector[:3].tolist() if abs(number) > 0.01]
    return [binary, *in_base64(binary), *decimal]


def in_base64(payload: bytes) -> list[bytes]:
    """Return the base64 digits for each alignment, without those that depend on neighboring bytes."""
    found = []
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + payload)
        found.append(encoded[4 if before else 0 : 4 * ((before + len(payload)) // 3)])
    return [form for form in found if len(form) >= 8]


def found_in(folder: Path, needles: Needles) -> dict[str, set[str]]:
    """Return the names of files that contain a needle, by kind of needle."""
    found: dict[str, set[str]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        content = name.encode() + path.read_bytes()
        for kind, forms in needles.items():
            if any(form in content for form in forms):
                found.setdefault(kind, set()).add(name)
    return found


# The work of a service


class Watched(Server):
    """Server whose files all lie in one folder: data, temporary files, caches, log. ``code``: what it runs first."""

    def __init__(self, folder: Path, master_key: str, url: str | None = None, code: str = "") -> None:
        self.folder = folder / "watched"
        for name in ("tmp", "home"):
            (self.folder / name).mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(code)
        own = {"KITH_MASTER_KEY": master_key, "KITH_API_KEY": OPERATOR, "KITH_LOG_LEVEL": "DEBUG"}
        path = os.pathsep.join([str(folder), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
        own |= {"TMPDIR": str(self.folder / "tmp"), "HOME": str(self.folder / "home"), "PYTHONPATH": path}
        super().__init__(self.folder / "data", url, self.folder / "log", **own)

    def client(self, attempts: int = 1) -> Kith:
        return Kith(self.url, OPERATOR, attempts=attempts)


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
        answer = httpx.post(
            f"{server.url}/v1/galleries/people/import?recognizer={kith.gallery('people').recognizer}",
            content="\n".join(map(json.dumps, lines)),
            headers={"Authorization": f"Bearer {OPERATOR}", "Content-Type": "application/x-ndjson"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
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


@pytest.fixture(scope="module")
def photos(astronaut: NDArray[np.uint8], actor: NDArray[np.uint8], nobody: NDArray[np.uint8]) -> list[bytes]:
    return [jpeg(image) for image in (astronaut, actor, nobody)]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_files_contain_no_personal_data(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, photos: list[bytes]
) -> None:
    master_key, url, cluster = new_key_text(), None, None
    if kind == "postgresql":
        cluster = request.getfixturevalue("postgres")
        url = cluster.create(f"kith_{uuid.uuid4().hex}")
    with closing(Watched(tmp_path, master_key, url)) as server:
        server.wait_until_ready()
        needles: Needles = work(server, *photos) | {"master key": forms_of_text(master_key)}
        kill_at_work(server, photos[0])
        names = {path.name for path in server.folder.rglob("*") if path.is_file()}
        assert {"log"} | (set() if cluster else {"kith.db", "kith.db-wal"}) <= names
        assert list((server.folder / "data" / "spool").iterdir())
        assert found_in(server.folder, needles) == {}

        server.launch()
        server.wait_until_ready()
        with server.client() as kith:
            kith.wait_for(next(kith.jobs("people")).id)
            assert kith.subject("people", ADA).name == NAME
        assert server.terminate(60) == -signal.SIGTERM  # uvicorn re-raises the signal after a graceful stop
        assert found_in(server.folder, needles) == {}
    if cluster is not None:
        cluster.stop("fast")
        try:
            assert found_in(cluster.folder, needles) == {}
        finally:
            cluster.start()


def test_an_unencrypted_service_leaves_all_of_it(tmp_path: Path, photos: list[bytes]) -> None:
    with closing(Watched(tmp_path, new_key_text(), code=UNENCRYPTED)) as server:
        server.wait_until_ready()
        needles = work(server, *photos)
        kill_at_work(server, photos[0])
        found = found_in(server.folder, needles)
        assert found.keys() == IN_CLEAR
        assert any("spool" in name for name in found["photo"])
        assert not any("log" in names for names in found.values())
