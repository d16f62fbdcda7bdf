"""CompreFace's published SDKs for Python and JavaScript, unmodified, against the compatible API."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reverse_proxies import python_proxy
from tests.service.api.compreface.conftest import CompatServer
from tests.service.api.test_generated_clients import fetched

HERE = Path(__file__).parent / "javascript"
KNOWN, UNKNOWN = 0.6, 0.4
TIMEOUT_S = 120
pytestmark = pytest.mark.filterwarnings(  # the SDK leaves files open
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(scope="module")
def sdk() -> Iterator[Any]:
    """The package ``compreface``.

    It pins requests-toolbelt 0.9.1, which imports a module that urllib3 2 no longer has. An empty module replaces it.
    """
    appengine = "urllib3.contrib.appengine"
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        patch.setitem(sys.modules, appengine, types.ModuleType(appengine))
        yield pytest.importorskip("compreface", reason="compreface-sdk is not installed: make setup")


@pytest.fixture(scope="module")
def prefixed(compat: CompatServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the server below a path prefix."""
    with python_proxy(compat.url, tmp_path_factory.mktemp("proxy")) as url:
        yield url


@pytest.fixture
def recognition(sdk: Any, compat: CompatServer, prefixed: str) -> Any:
    options = {"limit": 0, "det_prob_threshold": 0.8, "prediction_count": 1, "status": True}
    host, _, port_and_prefix = prefixed.rpartition(":")
    face = sdk.CompreFace(host, port_and_prefix, options)
    return face.init_face_recognition(compat.create_key(compat.create_gallery()))


def test_a_session(recognition: Any, photos: Path) -> None:
    subjects = recognition.get_subjects()
    assert subjects.add("Ada") == {"subject": "Ada"}
    assert subjects.add("Bo") == {"subject": "Bo"}
    assert subjects.list() == {"subjects": ["Ada", "Bo"]}
    assert subjects.update("Ada", "Cy") == {"updated": True}
    assert subjects.delete("Cy") == {"subject": "Cy"}
    assert subjects.delete_all() == {"deleted": 1}
    collection = recognition.get_face_collection()
    added = collection.add(image_path=str(photos / "astronaut.jpg"), subject="Ada")
    assert set(added) == {"image_id", "subject"}
    assert collection.list()["faces"] == [added]
    plugins = "calculator,age,gender,landmarks"
    options = {"limit": 2, "det_prob_threshold": 0.5, "prediction_count": 2, "face_plugins": plugins, "status": True}
    document = recognition.recognize(str(photos / "group.jpg"), options)
    assert len(document["result"]) == 2
    assert "plugins_versions" in document
    assert all(len(face["landmarks"]) == 5 and face["embedding"] for face in document["result"])
    assert recognition.recognize(str(photos / "nobody.jpg"))["code"] == 28
    assert collection.delete(added["image_id"]) == added


def test_viseron(recognition: Any, photos: Path) -> None:
    """The requests of Viseron: train again, then recognize. It reads the first subject of every face."""
    collection = recognition.get_face_collection()
    for _ in range(2):
        collection.delete_all("ada")
        for name in ("astronaut", "astronaut2"):
            assert "message" not in collection.add((photos / f"{name}.jpg").read_bytes(), "ada")
    assert collection.list()["total_elements"] == 2
    found: dict[str, list[str | None]] = {}
    for name in ("astronaut", "actor", "group"):
        for result in recognition.recognize((photos / f"{name}.jpg").read_bytes())["result"]:
            subject = result["subjects"][0]
            found.setdefault(name, []).append(subject["subject"] if subject["similarity"] >= KNOWN else None)
            assert {"x_min", "y_min", "x_max", "y_max"} <= set(result["box"])
    assert found["astronaut"] == ["ada"]
    assert not any(found["actor"] + found["group"])


def test_every_function(tmp_path: Path, compat: CompatServer, photos: Path) -> None:
    shutil.copytree(HERE, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules"))
    fetched("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", folder=tmp_path)
    key = compat.create_key(compat.create_gallery())
    command = ["node", "session.mjs", *compat.url.rsplit(":", 1), key, str(photos)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    enrolled = answers["enrolled"]
    assert answers["listed"]["faces"] == answers["several"] == [enrolled]
    (known,), (stranger,) = answers["known"]["result"], answers["stranger"]["result"]
    assert known["subjects"][0]["subject"] == enrolled["subject"] == "Ada"
    assert known["subjects"][0]["similarity"] >= KNOWN
    assert stranger["subjects"][0]["similarity"] < UNKNOWN
    assert answers["subjects"] == {"subjects": ["Ada", "Cy"]}
    assert (answers["added"], answers["renamed"]) == ({"subject": "Bo"}, {"updated": True})
    assert (answers["noFace"]["code"], answers["deleted"]) == (28, {"subject": "Cy"})
    assert (answers["emptied"], answers["deletedAll"]) == ({"deleted": 0}, {"deleted": 1})
