"""Every command of docs/training.md runs, in order, on a small subset of the real data."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import cv2
import httpx2 as httpx
import pytest
import torch

from models.pack.loading import load_pack
from tests.conftest import ROOT
from tests.faults.servers import serving
from training.cli.commands import app

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("pictures")]

SMALL_RUN = (
    "--epochs 1 --threads 1 --set data.max_identities=12 --set loop.batch_size=8 --set loop.warmup=0.1 "
    "--set backbone.widths=[16,16,16] --set backbone.depths=[1,1,1] --set loop.precision=fp32"
)
SMALLER = {
    "kith-train run": SMALL_RUN,
    "torchrun": SMALL_RUN,
    "kith-train resume": "--threads 1 --set loop.epochs=2",
    "kith-train compare cosface": "--epochs 1 --people 40 --threads 1",
    "kith-train compare": "softmax triplet --epochs 1 --people 40 --threads 1",
}
"""Arguments added to commands to make them fast."""


@pytest.fixture(scope="module")
def workplace(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create PHOTOS and a small DATA beside the packs."""
    root = tmp_path_factory.mktemp("tutorial")
    (root / "models").symlink_to(ROOT / "models")
    _small_celeba(data / "celeba", root / "DATA" / "celeba")
    _photos(root / "DATA" / "celeba", root / "PHOTOS")
    _small_lfw(data / "lfw", root / "DATA" / "lfw")
    _small_annotated(data / "wider", root / "DATA" / "wider")
    return root


def _small_celeba(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    (target / "crops").symlink_to(source / "crops")
    by_person = _people(source)
    with (target / "manifest.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ("file", "identity"), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(row for rows in [r for r in by_person if len(r) >= 6][:40] for row in rows[:6])


def _people(crops: Path) -> list[list[dict[str, str]]]:
    with (crops / "manifest.csv").open(newline="") as stream:
        rows = sorted(csv.DictReader(stream), key=lambda row: (row["identity"], row["file"]))
    return [list(of_one) for _, of_one in groupby(rows, lambda row: row["identity"])]


def _photos(crops: Path, target: Path) -> None:
    """Write twelve people's crops with margins, as photos that need detection."""
    for rows in _people(crops)[:12]:
        (target / rows[0]["identity"]).mkdir(parents=True)
        for i, row in enumerate(rows[:5]):
            image = cv2.imread(str(crops / row["file"]))
            assert image is not None
            wide = cv2.copyMakeBorder(cv2.resize(image, (160, 160)), 60, 60, 60, 60, cv2.BORDER_REPLICATE)
            cv2.imwrite(str(target / row["identity"] / f"{i}.jpg"), wide)


def _small_lfw(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    (target / "images").symlink_to(source / "images")
    header, *lines = (source / "pairs.txt").read_text().splitlines()
    assert header.split() == ["10", "300"]
    kept = [line for i, line in enumerate(lines) if i % 300 < 6]
    (target / "pairs.txt").write_text("\n".join(["10\t6", *kept]) + "\n")
    for name, count, keep in (("Train", 1100, 60), ("Test", 500, 20)):
        header, *lines = (source / f"pairsDev{name}.txt").read_text().splitlines()
        kept = lines[:keep] + lines[count : count + keep]
        (target / f"pairsDev{name}.txt").write_text("\n".join([str(keep), *kept]) + "\n")
    protocol = json.loads((source / "openset_protocol.json").read_text())
    gallery = protocol["gallery"][:20]
    people = {file.split("/")[0] for file in gallery}
    mated = [file for file in protocol["mated_probes"] if file.split("/")[0] in people][:40]
    small = {**protocol, "gallery": gallery, "mated_probes": mated, "nonmated_probes": protocol["nonmated_probes"][:40]}
    (target / "openset_protocol.json").write_text(json.dumps(small))
    rows = (source / "landmarks_yunet.csv").read_text().splitlines()[:30]
    (target / "landmarks_yunet.csv").write_text("\n".join(rows) + "\n")


def _small_annotated(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    (target / "images").symlink_to(source / "images")
    lines = (source / "annotations.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["split"] == "val"][:4]
    (target / "annotations.jsonl").write_text("\n".join(kept) + "\n")


def commands() -> list[str]:
    text = (ROOT / "docs" / "training.md").read_text()
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def longer(command: str) -> str:
    added = next((more for start, more in SMALLER.items() if command.startswith(start)), "")
    return f"{command} {added}"


def test_the_tutorial_from_photos_to_a_served_pack(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    outputs = {}
    for command in commands():
        capsys.readouterr()
        if command.startswith("KITH_PACK="):
            _serve(workplace, command, monkeypatch)
        elif command.startswith("torchrun"):
            _run_outside(longer(command))
        else:
            app(shlex.split(longer(command))[1:], standalone_mode=False)
            # Commands that use all cores change the thread count of torch.
            torch.set_num_threads(1)
        outputs[command.split(" --")[0]] = capsys.readouterr().out
    runs = workplace / "runs"
    assert "People" in outputs["kith-train inspect PHOTOS"]
    assert "12" in outputs["kith-train inspect PHOTOS"]
    for name, epochs in (("mine", 2), ("adacos", 1), ("student", 1), ("two", 1)):
        lines = (runs / name / "losses.csv").read_text().splitlines()
        assert len(lines) > epochs * 5, name
    assert "adacos" in outputs["kith-train losses"]
    assert "View 2" in outputs["kith-train evaluate runs/mine"]
    assert json.loads((runs / "mine" / "report.json").read_text())["lfw"]["view2"]
    assert (runs / "mine" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (runs / "mine" / "recognizer.onnx").stat().st_size > 10_000
    pack = load_pack(runs / "pack")
    pack.verify()
    evidence = json.loads((runs / "evidence.json").read_text())
    assert evidence["recognizer"] == pack.recognition.fingerprint()
    assert pack.calibration is not None
    assert evidence["calibration"]["histograms"] == pack.calibration["histograms"]
    assert evidence["metrics"]["lfw_view2"] == pack.metrics["lfw_view2"]
    card = (pack.directory / "MODEL_CARD.md").read_text()
    assert "60 aligned" in card.replace("\n", " ")
    assert "terms of the training photos are unknown" in card
    assert "CelebA's terms" not in card
    assert json.loads((runs / "pack.json").read_text())["lfw"]["open_set"]
    assert outputs["kith-train compare"].startswith(
        "| loss | Training loss | Training accuracy % | View 1 % | View 2 % |"
    )
    assert len((runs / "comparison" / "comparison.md").read_text().splitlines()) == 4
    assert len((runs / "grid" / "comparison.md").read_text().splitlines()) == 2 + 6


def _run_outside(command: str) -> None:
    words = shlex.split(command)
    scripts = {"torchrun", "kith-train"}
    here = Path(sys.executable).parent
    words = [str(here / word) if word in scripts else word for word in words]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]


def _serve(workplace: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, *words = shlex.split(command)
    assert words == ["kith", "serve"]
    name, _, value = setting.partition("=")
    monkeypatch.setenv(name, value)
    with serving(workplace / "served", None) as (server,):
        assert httpx.get(f"{server.url}/v1/models").json()["model"] == "mine"
        with server.client() as kith:
            (image,) = kith.embed(next((workplace / "PHOTOS").glob("*/*.jpg"))).images
        (face,) = image.faces
        assert face.embedding is not None
        assert len(face.embedding) == 256
