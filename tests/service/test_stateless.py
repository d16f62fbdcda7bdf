"""A stateless service answers about photos, and leaves nothing behind."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith, KithClientError
from service.core.errors import SettingsError
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg


def test_it_detects_embeds_and_verifies_without_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, astronaut: NDArray[np.uint8]
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    photo, key = jpeg(astronaut), "k" * 32
    settings = load_settings(stateless=True, data_dir=tmp_path / "data", api_key=key, log_level="WARNING")
    with embedded(settings) as url, Kith(url, api_key=key) as kith:
        (face,) = kith.embed(photo).images[0].faces
        assert kith.verify(photo, np.array(face.embedding)).outcome == "same"
        assert httpx.get(f"{url}/readyz").status_code == 200
        for path in ("/v1/galleries", "/v1/keys", "/console", "/"):
            answer = httpx.get(url + path, headers={"X-API-Key": key})
            assert answer.status_code == 404, path
        with pytest.raises(KithClientError) as missing:
            kith.create_gallery("staff")
        assert missing.value.status == 404
        paths = httpx.get(f"{url}/openapi.json").json()["paths"]
        assert {"/v1/detect", "/v1/embed", "/v1/verify"} < set(paths)
        assert not any("galleries" in path for path in paths)
        loaded = re.findall(r'(?:src|href)="([^"]+)"', httpx.get(f"{url}/docs").text)
        assert [httpx.get(f"{url}/{path}").status_code for path in loaded] == [200] * 4
    assert not (tmp_path / "data").exists()
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("setting", ["database_url", "milvus_uri"])
def test_a_place_to_store_data_is_refused(setting: str) -> None:
    with pytest.raises(SettingsError, match=f"unset KITH_{setting.upper()}"):
        load_settings(stateless=True, **{setting: "http://127.0.0.1:1"})
