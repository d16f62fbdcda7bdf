"""CompreFace's published JavaScript SDK, unmodified, against the compatible API."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.service.api.compreface.conftest import CompatServer
from tests.service.api.test_generated_clients import fetched

HERE = Path(__file__).parent / "javascript"
KNOWN, UNKNOWN = 0.6, 0.4
TIMEOUT_S = 120


def test_every_function(tmp_path: Path, compat: CompatServer, photos: Path) -> None:
    shutil.copytree(HERE, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules"))
    fetched("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", folder=tmp_path)
    key = compat.create_key(compat.create_gallery())
    command = ["node", "session.mjs", compat.host, compat.port, key, str(photos)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
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
