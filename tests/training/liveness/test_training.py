"""A liveness network from photos to a served pack, on simulated attacks (tests.training.liveness.simulated_attacks)."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from kith import Kith
from models.errors import PackError
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import MANIFEST_FILE
from models.pack.writing import update_liveness
from models.vision.detection import Detector, largest_box
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg
from tests.training.liveness.simulated_attacks import write_simulation
from training.cli.commands import app
from training.config import ConfigError
from training.data.identities import read_rgb
from training.errors import NonFiniteLossError, ParityError, RunInterruptedError
from training.evaluation.liveness import evaluate_liveness, score_presentations
from training.export import onnx_export
from training.export.liveness import check_writable
from training.export.onnx_export import export_liveness
from training.liveness import fit
from training.liveness.data import LIVE, Presentations, load_presentations
from training.liveness.fit import TRAINED_ALIGNMENT, LivenessLoopConfig, build_network, fit_liveness
from training.optimization.loop import to_tensor
from training.optimization.run_folder import CHECKPOINT, load_checkpoint, save_atomically
from training.run.train import train_liveness

PHOTOS = 10
LOOP = LivenessLoopConfig(steps=6, batch_size=8, warmup_steps=2, checkpoint_seconds=0.0)


def losses(run: Path) -> list[dict[str, str]]:
    with (run / "losses.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def faces(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Live photos, simulated screens and simulated prints of ten people."""
    root = tmp_path_factory.mktemp("faces")
    files = sorted((data / "scenes" / "images").iterdir())[:PHOTOS]
    write_simulation([(file.stem, read_rgb(file)) for file in files], root)
    return root


def noise(seed: int = 3) -> Presentations:
    crops = np.random.default_rng(seed).integers(0, 256, (12, 112, 112, 3), dtype=np.uint8)
    names = np.array([LIVE, LIVE, "print", "screen"] * 3)
    return Presentations(crops, names, np.array([str(i) for i in range(12)]), {})


def test_photos_become_a_served_verdict(
    faces: Path, detector: Detector, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scores of the server are those of the evaluation."""
    pack = Path(shutil.copytree(BUNDLED_PACK, tmp_path / "pack"))
    folders = ["--live", str(faces / "live"), "--attack", str(faces / "attack")]
    arguments = ["liveness", str(pack), *folders, "--output", str(tmp_path / "run"), "--steps", "30", "--threads", "1"]
    app(arguments, standalone_mode=False)
    assert "APCER, " in capsys.readouterr().out
    values = [float(row["loss"]) for row in losses(tmp_path / "run")]
    assert np.mean(values[-8:]) < 0.8 * np.mean(values[:8])

    app(["evaluate-liveness", str(pack), *folders], standalone_mode=False)
    assert "BPCER at APCER 10%" in capsys.readouterr().out
    made, bundled = load_pack(pack), load_pack(BUNDLED_PACK)
    made.verify()
    assert made.recognition.fingerprint() == bundled.recognition.fingerprint()
    assert made.liveness is not None
    development = made.provenance["liveness"]["development"]
    assert development["threshold"] == made.liveness.threshold
    assert {name: rate["presentations"] for name, rate in development["apcer"].items()} == {"print": 2, "screen": 2}
    document = json.loads((pack / MANIFEST_FILE).read_text())
    assert str(tmp_path) not in json.dumps(document)

    # A large photo, which the service decodes at a reduced scale.
    large = tmp_path / "large"
    for place in ("live", "attack/print"):
        (large / place).mkdir(parents=True)
        photo = cv2.resize(read_rgb(next((faces / "live").iterdir())), None, fx=6, fy=6)
        grain = np.random.default_rng(2).normal(0, 30, photo.shape)
        (large / place / "0.jpg").write_bytes(jpeg(np.clip(photo + grain, 0, 255).astype(np.uint8)))
    settings = load_settings(data_dir=tmp_path / "data", pack=pack, precision="fp32", log_level="ERROR")
    with embedded(settings) as url, Kith(url) as kith:
        for root in (faces, large):
            photos = load_presentations(root / "live", root / "attack", detector, TRAINED_ALIGNMENT, 0.3)
            scores = score_presentations(made.liveness, photos)
            for name, person, score in list(zip(photos.instruments, photos.people, scores, strict=True))[::5]:
                file = root / ("live" if name == LIVE else f"attack/{name}") / f"{person}.jpg"
                (image,) = kith.detect(file).images
                face = image.faces[largest_box(np.array([face.box for face in image.faces]))]
                assert face.liveness is not None
                assert face.liveness.score == pytest.approx(score, abs=0.02)
                assert face.liveness.verdict == ("live" if score >= made.liveness.threshold else "not_live")


def test_an_interrupted_run_resumes_with_equal_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fit_liveness(noise(), LOOP, tmp_path / "whole")

    @contextmanager
    def after_three_steps() -> Iterator[Callable[[], bool]]:
        steps = iter(range(1, LOOP.steps + 1))
        yield lambda: next(steps) >= 3

    with monkeypatch.context() as patch:
        patch.setattr(fit, "stop_requests", after_three_steps)
        with pytest.raises(RunInterruptedError, match="stopped at step 3 of 6"):
            fit_liveness(noise(), LOOP, tmp_path / "cut")
    assert len(losses(tmp_path / "cut")) == 3
    resumed = fit_liveness(noise(), LOOP, tmp_path / "cut")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_resumes_only_with_the_same_photos(tmp_path: Path) -> None:
    train_liveness(noise(), tmp_path, replace(LOOP, steps=1))
    fewer = noise().select(np.arange(12) < 11)
    with pytest.raises(ConfigError, match=r"photos\.screen"):
        train_liveness(fewer, tmp_path, replace(LOOP, steps=1))
    train_liveness(noise(), tmp_path, replace(LOOP, steps=2))
    assert len(losses(tmp_path)) == 2


def test_a_non_finite_loss_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    train_liveness(noise(), tmp_path, replace(LOOP, steps=1))
    state = load_checkpoint(tmp_path / CHECKPOINT)
    next(value for value in state["model"].values() if value.is_floating_point()).fill_(float("nan"))
    save_atomically(tmp_path / CHECKPOINT, state)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(NonFiniteLossError, match="step 1"):
        train_liveness(noise(), tmp_path, replace(LOOP, steps=2))
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_an_export_that_differs_from_torch_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crops = to_tensor(noise().crops_NHWC)
    monkeypatch.setattr(onnx_export, "MAX_SCORE_SHIFT", -1.0)
    with pytest.raises(ParityError, match="liveness score"):
        export_liveness(build_network(), crops, tmp_path / "liveness.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_pack_is_changed_only_if_it_loads(tmp_path: Path) -> None:
    pack = Path(shutil.copytree(BUNDLED_PACK, tmp_path / "pack"))
    before = (pack / MANIFEST_FILE).read_bytes()
    for task in ({"file": "recognizer.onnx"}, {"file": "absent.onnx"}):
        with pytest.raises(PackError, match=r"tasks\.liveness"):
            update_liveness(pack, task, {})
    assert (pack / MANIFEST_FILE).read_bytes() == before
    with pytest.raises(PackError, match="kith-train liveness"):
        evaluate_liveness(load_pack(pack), tmp_path, tmp_path)
    (pack / MANIFEST_FILE).unlink()
    with pytest.raises(PackError, match="only packs with a manifest"):
        check_writable(load_pack(pack))
