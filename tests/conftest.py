"""Shared fixtures: real photos, a real server, real data where it is at hand."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import absl.logging
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from models.detection import Detector
from models.pack import BUNDLED, ModelPack, load_pack
from models.recognition import Recogniser
from models.risk import Calibration, histogram
from models.runtime import OnnxNetwork
from models.tails import fit_tail
from service.client import Kith
from service.demo import package_file
from service.server import embedded
from service.settings import Settings, load_settings
from tests.databases import ENVIRONMENT
from tests.milvus_lite import MilvusLite
from tests.postgres import DatabaseUrl, Postgres

ROOT = Path(__file__).parent.parent
# Whoever configures logging anew (pymilvus, uvicorn) closes the handlers there are, and absl's closes its stream, which
# would be pytest's: this one it never closes.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__


@pytest.fixture(scope="session", autouse=True)
def _no_outside_settings() -> Iterator[None]:
    """A developer's KITH_ variables must not steer the tests, but for those that are the tests' own.

    A service that a test starts beside the shared one runs its networks in the engine that opens them in a fifth of the
    time: the one chosen by default compiles for longer than most of these tests last. The default is that of the shared
    server, of tests/models, and of the tests that unset KITH_ENGINE.
    """
    own = ("KITH_BROWSER", "KITH_DATA", "KITH_DLIB", "KITH_IMAGE", "KITH_REFERENCE", "KITH_TEST_MILVUS")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("KITH_") and name not in own:
                patch.delenv(name)
        for name, value in (ENVIRONMENT | {"KITH_ENGINE": "onnxruntime"}).items():
            patch.setenv(name, value)
        # Processes that tests start read what the first of them compiled.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


@pytest.fixture(scope="session")
def data() -> Path:
    """The research data: skips, with the reason, where it is absent."""
    root = Path(os.environ.get("KITH_DATA", ROOT.parent / "shared" / "data"))
    if not (root / "lfw" / "images").is_dir():
        pytest.skip(f"research data is not at {root}: set KITH_DATA")
    return root


@pytest.fixture(scope="session")
def reference() -> Path:
    """An InsightFace-style directory without a manifest; skips where it is absent."""
    root = Path(os.environ.get("KITH_REFERENCE", ROOT.parent / "shared" / "reference"))
    if not (root / "recognizer.onnx").is_file():
        pytest.skip(f"reference models are not at {root}: set KITH_REFERENCE")
    return root


@pytest.fixture(scope="session")
def dlib_file() -> Path:
    """dlib_face_recognition_resnet_model_v1.dat, as it lies in the sdist of face_recognition_models; skips where
    KITH_DLIB does not name it."""
    path = Path(os.environ.get("KITH_DLIB", "absent"))
    if not path.is_file():
        pytest.skip("KITH_DLIB does not name dlib_face_recognition_resnet_model_v1.dat")
    return path


def photo_array(package: str, *parts: str) -> NDArray[np.uint8]:
    with Image.open(package_file(package, *parts)) as image:
        return np.asarray(image.convert("RGB"))


def jpeg(image: NDArray[np.uint8] | Image.Image, quality: int = 92) -> bytes:
    buffer = io.BytesIO()
    opened = image if isinstance(image, Image.Image) else Image.fromarray(image)
    opened.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def astronaut() -> NDArray[np.uint8]:
    """One person, 512x512."""
    return photo_array("skimage", "data", "astronaut.png")


@pytest.fixture(scope="session")
def actor() -> NDArray[np.uint8]:
    """Another person."""
    return photo_array("insightface", "data", "images", "Tom_Hanks_54745.png")


@pytest.fixture(scope="session")
def group() -> NDArray[np.uint8]:
    """Six people, 1280x886."""
    return photo_array("insightface", "data", "images", "t1.jpg")


@pytest.fixture(scope="session")
def nobody() -> NDArray[np.uint8]:
    """A photo without a face."""
    return photo_array("skimage", "data", "coffee.png")


@pytest.fixture(scope="session")
def pack() -> ModelPack:
    return load_pack(BUNDLED)


@pytest.fixture(scope="session")
def detector(pack: ModelPack) -> Detector:
    return Detector(OnnxNetwork(pack.detection.path), pack.detection)


@pytest.fixture(scope="session")
def recogniser(pack: ModelPack) -> Recogniser:
    return Recogniser(OnnxNetwork(pack.recognition.path), pack.recognition)


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return load_settings(data_dir=tmp_path_factory.mktemp("kith"), log_level="WARNING", engine=None)


@pytest.fixture(scope="session")
def server(settings: Settings) -> Iterator[str]:
    """A real server on a free port, shared; tests use galleries of their own."""
    with embedded(settings) as url:
        yield url


@pytest.fixture
def kith(server: str) -> Iterator[Kith]:
    with Kith(server) as client:
        yield client


@pytest.fixture
def gallery(kith: Kith, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh gallery named after the test."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]
    kith.create_gallery(name)
    yield name
    kith.delete_gallery(name)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture(scope="session")
def calibration() -> Calibration:
    """Simulated evidence: strangers at N(0, 0.1), mates at N(0.6, 0.15)."""
    rng = np.random.default_rng(1)
    impostors = rng.normal(0, 0.1, 1_000_000)
    start = float(np.quantile(impostors, 0.999))
    beyond = impostors[impostors > start] - start
    tail = fit_tail(beyond, np.ones(len(beyond)), start, 0.001)
    return Calibration(histogram(impostors), histogram(rng.normal(0.6, 0.15, 20_000)), tail)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A running cluster; who stops it starts it again."""
    folder = Path(tempfile.mkdtemp(prefix="kith-postgres-"))  # short: a socket's path may have 107 bytes
    try:
        cluster = Postgres(folder)
        cluster.start()
    except RuntimeError as reason:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(str(reason))
    yield cluster
    cluster.stop("immediate")
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def milvus_lite() -> Iterator[MilvusLite]:
    """Milvus Lite behind a socket, as a server is; who kills it starts it again."""
    with tempfile.TemporaryDirectory(prefix="kith-milvus-") as folder:
        server = MilvusLite(Path(folder) / "data")
        server.start()
        yield server
        server.kill()


@pytest.fixture(scope="session")
def milvus_server() -> str:
    """The URI of a whole Milvus; skips where KITH_TEST_MILVUS does not name one."""
    uri = os.environ.get("KITH_TEST_MILVUS")
    if not uri:
        pytest.skip("KITH_TEST_MILVUS does not name a Milvus server")
    return uri


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> DatabaseUrl:
    """Of each kind of database in turn."""
    return url_maker(request, tmp_path)


def url_maker(request: pytest.FixtureRequest, tmp_path: Path) -> DatabaseUrl:
    """Of the kind of database that a fixture's parameter names."""
    if request.param == "sqlite":
        return lambda: f"sqlite:///{tmp_path / uuid.uuid4().hex}.db"
    cluster: Postgres = request.getfixturevalue("postgres")
    return lambda: cluster.create(f"kith_{uuid.uuid4().hex}")
