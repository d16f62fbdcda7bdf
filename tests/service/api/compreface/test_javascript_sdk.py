"""CompreFace's published JavaScript SDK, unmodified, against the compatible API."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.service.api.compreface.conftest import CompatServer

HERE = Path(__file__).parent / "javascript"
KNOWN, UNKNOWN = 0.6, 0.4
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the SDK. Skips if node or npm is missing, or the packages cannot be fetched."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    folder = tmp_path_factory.mktemp("javascript")
    for file in HERE.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    try:
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pytest.skip("npm cannot fetch the SDK in time")
    if done.returncode:
        pytest.skip(f"npm cannot fetch the SDK: {done.stderr[-200:]}")
    return folder


def test_every_function(installed: Path, compat: CompatServer, photos: Path) -> None:
    key = compat.create_key(compat.create_gallery())
    command = ["node", "session.mjs", compat.host, compat.port, key, str(photos)]
    done = subprocess.run(command, cwd=installed, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    enrolled = answers["enrolled"]
    assert answers["added"] == {"subject": "Bo"}
    assert enrolled["subject"] == "Ada"
    assert answers["listed"]["faces"] == [enrolled]
    (known,), (stranger,) = answers["known"]["result"], answers["stranger"]["result"]
    assert known["subjects"][0]["subject"] == "Ada"
    assert known["subjects"][0]["similarity"] >= KNOWN
    assert stranger["subjects"][0]["similarity"] < UNKNOWN
    assert answers["renamed"] == {"updated": True}
    assert answers["subjects"] == {"subjects": ["Ada", "Cy"]}
    assert answers["noFace"]["code"] == 28
    assert answers["several"] == [enrolled]
    assert answers["emptied"] == {"deleted": 0}
    assert answers["deleted"] == {"subject": "Cy"}
    assert answers["deletedAll"] == {"deleted": 1}
