"""Shared fixtures: real photos, a real server, and real data where available."""

from __future__ import annotations

import inspect
import io
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import absl.logging
import httpx2 as httpx
import hypothesis
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from kith import Kith
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import ModelPack
from models.risk.calibration import Calibration, fit_tail, histogram
from models.runtime.onnx_runtime import OnnxNetwork
from models.vision.detection import Detector
from models.vision.recognition import Recognizer
from service.cli.tools.demo import package_file
from service.server import embedded
from service.settings import OTHERS, Settings, load_settings
from tests.databases import ENVIRONMENT
from tests.milvus_lite import MilvusLite
from tests.postgres import DatabaseUrl, Postgres, cluster_folder

ROOT = Path(__file__).parent.parent
LOOPBACK = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
STYLES = (
    "CLICOLOR_FORCE",
    "FORCE_COLOR",
    "GITHUB_ACTIONS",
    "NO_COLOR",
    "PY_COLORS",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
)
"""Variables that change how commands print."""
# A background shell ignores Ctrl-C, and so would the commands that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Machines differ in speed, so examples have no time limit. They are equal in each run.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("tests")
# httpx waits 5 seconds by default, which is short on a loaded machine.
inspect.signature(httpx.get).parameters["timeout"].default.read = 60
# Libraries that reconfigure logging (pymilvus, uvicorn) close all handlers. absl's handler would close pytest's
# stream, so it gets a handler that never closes it.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__


@pytest.fixture(scope="session", autouse=True)
def _no_outside_settings() -> Iterator[None]:
    """Remove the developer's KITH_ variables, except the tests' own, and settings of proxies and colors.

    Servers that a test starts use the engine that opens networks five times faster: the default one compiles for
    longer than most tests run. The shared server, tests/models and tests that unset KITH_RUNTIME use the default.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("KITH_") and name.removeprefix("KITH_") not in OTHERS["tests"]:
                patch.delenv(name)
        for name, value in (ENVIRONMENT | LOOPBACK | {"KITH_RUNTIME": "onnxruntime"}).items():
            patch.setenv(name, value)
        # Tests send more embeddings than a server accepts.
        patch.setattr("service.api.http.bodies.MAX_EMBEDDINGS", 1000)
        for name in STYLES:
            patch.delenv(name, raising=False)
        # Test processes share the compiled networks of the first one.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


@pytest.fixture(scope="session")
def data() -> Path:
    """Research data. Skips with a reason if it is absent."""
    root = Path(os.environ.get("KITH_DATA", ROOT.parent / "shared" / "data"))
    if not (root / "lfw" / "images").is_dir():
        pytest.skip(f"research data is not at {root}: set KITH_DATA")
    return root


@pytest.fixture(scope="session")
def reference() -> Path:
    """An InsightFace-style directory without a manifest. Skips if it is absent."""
    root = Path(os.environ.get("KITH_REFERENCE", ROOT.parent / "shared" / "reference"))
    if not (root / "recognizer.onnx").is_file():
        pytest.skip(f"reference models are not at {root}: set KITH_REFERENCE")
    return root


def photo_array(package: str, *parts: str) -> NDArray[np.uint8]:
    with Image.open(package_file(package, *parts)) as image:
        return np.asarray(image.convert("RGB"))


def jpeg(image: NDArray[np.uint8] | Image.Image, quality: int = 92) -> bytes:
    buffer = io.BytesIO()
    opened = image if isinstance(image, Image.Image) else Image.fromarray(image)
    opened.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def is_eventually(check: Callable[[], bool]) -> None:
    """Wait until it is so."""
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_ready(url: str) -> bool:
    """Return whether a server answers that it is ready."""
    try:
        return httpx.get(f"{url}/readyz", timeout=60).is_success
    except httpx.TransportError:
        return False


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
    return load_pack(BUNDLED_PACK)


@pytest.fixture(scope="session")
def detector(pack: ModelPack) -> Detector:
    return Detector(OnnxNetwork(pack.detection.path), pack.detection)


@pytest.fixture(scope="session")
def recognizer(pack: ModelPack) -> Recognizer:
    return Recognizer(OnnxNetwork(pack.recognition.path), pack.recognition)


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return load_settings(data_dir=tmp_path_factory.mktemp("kith"), log_level="WARNING", runtime=None)


@pytest.fixture(scope="session")
def server(settings: Settings) -> Iterator[str]:
    """A real shared server on a free port; tests use galleries of their own."""
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
    """A running cluster. A test that stops it must restart it."""
    folder = cluster_folder()
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
    """Milvus Lite behind a socket, like a server. A test that kills it must restart it."""
    with tempfile.TemporaryDirectory(prefix="kith-milvus-") as folder:
        server = MilvusLite(Path(folder) / "data")
        server.start()
        yield server
        server.kill()


@pytest.fixture(scope="session")
def milvus_server() -> str:
    """URI of a full Milvus server. Skips if KITH_TEST_MILVUS is not set."""
    uri = os.environ.get("KITH_TEST_MILVUS")
    if not uri:
        pytest.skip("KITH_TEST_MILVUS does not name a Milvus server")
    return uri


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> DatabaseUrl:
    """Factory of empty databases, parametrized over all kinds."""
    return url_maker(request, tmp_path)


def url_maker(request: pytest.FixtureRequest, tmp_path: Path) -> DatabaseUrl:
    """Factory of empty databases of the kind that the parameter names."""
    if request.param == "sqlite":
        return lambda: f"sqlite:///{tmp_path / uuid.uuid4().hex}.db"
    cluster: Postgres = request.getfixturevalue("postgres")

    def make() -> str:
        name = f"kith_{uuid.uuid4().hex}"
        request.addfinalizer(lambda: cluster.drop(name))
        return cluster.create(name)

    return make
