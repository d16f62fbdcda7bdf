"""Shared benchmark code has few imports and reports missing packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.common import write
from bench.photos import lfw_or_exit, packs_beside_reference
from models.errors import PackError
from models.pack.loading import BUNDLED_PACK, load_pack
from tests.conftest import ROOT


def test_a_page_of_routes_does_not_wait_for_torch() -> None:
    told = "import sys, tools.rest_reference; print(sorted({'torch', 'training'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


def test_missing_lfw_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITH_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match=f"not at {tmp_path}: set KITH_DATA"):
        lfw_or_exit()
    (tmp_path / "lfw" / "images").mkdir(parents=True)
    assert lfw_or_exit() == tmp_path / "lfw"


def test_the_reference_is_judged_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KITH_REFERENCE", str(tmp_path))
    assert list(packs_beside_reference()) == ["bundled"]
    assert f"no reference models at {tmp_path}" in capsys.readouterr().err
    (tmp_path / "detector.onnx").touch()
    with pytest.raises(PackError):
        packs_beside_reference()
    assert list(packs_beside_reference(lambda _: load_pack(BUNDLED_PACK))) == ["bundled", "reference"]


def test_figures_lie_beside_their_page(tmp_path: Path) -> None:
    page = tmp_path / "new" / "found.md"
    write(page, "# Found\n", {"rate": 0.5})
    assert page.read_text() == "# Found\n"
    assert json.loads(page.with_suffix(".json").read_text()) == {"rate": 0.5}
