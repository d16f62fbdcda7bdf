"""The demo makes correct decisions on real photos, and reports wrong ones."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from kith import Kith
from kith.wire.identification import IdentityOut
from service.cli.tools import demo, drawing
from service.cli.tools.demo import GALLERY, PhotosMissingError, package_file, run_demo, varied_samples
from tests.conftest import ROOT


def test_every_decision_is_correct(kith: Kith, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture numbers faces as the text does, from the left."""
    out = io.StringIO()
    drawn: list[Sequence[IdentityOut]] = []
    draw = drawing.draw_decisions

    def watch(photo: bytes, results: Sequence[IdentityOut], target: Path) -> None:
        drawn.append(results)
        draw(photo, results, target)

    monkeypatch.setattr(demo, "draw_decisions", watch)
    assert run_demo(kith, tmp_path, Console(file=out, width=200)), out.getvalue()
    kith.delete_gallery(GALLERY)
    assert "WRONG" not in out.getvalue()
    with Image.open(tmp_path / "decisions.png") as picture:
        assert picture.width > 500
    (results,) = drawn
    said = re.findall(r"face (\d) from the left: (\w+)", out.getvalue())
    assert said == [(str(number), each.name or each.outcome) for number, each in enumerate(results, start=1)]
    lefts = [each.face.box[0] for each in results if each.face]
    assert lefts == sorted(lefts)
    assert [name for _, name in said[:2]] == ["Robin", "Sam"]


def test_printed_commands_work_where_the_demo_was_started(tmp_path: Path) -> None:
    called, folder = "bin/kith", "my demo [of today]"
    program = tmp_path / "bin" / "kith"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom service.cli.entry import main\nmain()\n")
    program.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "COLUMNS": "40"}

    def shell(command: str) -> str:
        words = ["/bin/bash", "-euc", command]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    said = shell(f"{called} demo --output '{folder}'")
    commands = re.findall(rf"^   ({called} .*)$", said, re.MULTILINE)
    assert [command.split()[1] for command in commands] == ["enroll", "identify", "serve"]
    assert "4 photos enrolled" in shell(commands[0])
    assert {"robin", "sam"} <= set(shell(commands[1]).split())
    assert (tmp_path / folder / "who.png").exists()
    assert "Serve" in shell(commands[2].replace(" serve ", " serve --help "))


def test_a_wrong_decision_and_missing_photos_are_reported(
    kith: Kith, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, original = io.StringIO(), Kith.create_gallery

    def accept_every_face(self: Kith, name: str, **_: Any) -> Any:
        return original(self, name, risk={"threshold": -1.0})

    monkeypatch.setattr(Kith, "create_gallery", accept_every_face)
    assert not run_demo(kith, tmp_path, Console(file=out, width=200))
    assert "WRONG" in out.getvalue()
    kith.delete_gallery(GALLERY)
    for package in ("no_such_package", "skimage"):
        with pytest.raises(PhotosMissingError, match=package if "no" in package else r"x\.png"):
            package_file(package, "x.png")


def test_every_second_sample_has_all_lights() -> None:
    """Quantization takes its ranges from one half of the samples, and measures its loss on the other."""
    means = np.array([photo.mean() for photo in varied_samples()])
    assert abs(means[::2].mean() / means[1::2].mean() - 1) < 0.1
    assert means.max() > 1.5 * means.min()
