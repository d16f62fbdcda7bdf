"""A run from photos to a pack: resumable to the bit, refused where it must be, loadable where it ends."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from models.detection import Detector
from models.runtime import Network
from training.backbones import ThinIResNet
from training.config import BackboneConfig, ConfigError, DataConfig, HeadConfig, LoopConfig, RunConfig
from training.data.augment import augment
from training.data.identities import list_identities, load_identities
from training.detection.data import AnnotatedPhoto, training_crop
from training.detection.network import FaceDetector
from training.detection.targets import Faces, assign, box_overlap
from training.evaluate import read_pairs
from training.export import ParityError, export_detector, export_recogniser
from training.loop import NonFiniteLossError, batch_rows, fit, learning_rate, to_tensor
from training.recipes import RECIPES
from training.run import build_backbone, build_head, train_recogniser

TINY = BackboneConfig(embedding_dim=16, widths=(8, 8, 16), depths=(1, 1, 1), stem=8)


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Six people as six colours, four noisy crops each."""
    root = tmp_path / "people"
    for person in range(6):
        (root / f"p{person}").mkdir(parents=True)
        colour = rng.integers(0, 255, 3)
        for i in range(4):
            image = np.clip(colour + rng.normal(0, 20, (112, 112, 3)), 0, 255).astype(np.uint8)
            cv2.imwrite(str(root / f"p{person}" / f"{i}.png"), image)
    return root


def tiny_run(folder: Path, output: Path, epochs: int = 4, head: str = "adacos") -> RunConfig:
    return RunConfig(
        "tiny",
        output,
        DataConfig(folder, manifest=None),
        TINY,
        HeadConfig(name=head),  # type: ignore[arg-type]
        LoopConfig(epochs=epochs, batch_size=8, warmup_steps=2, checkpoint_seconds=0.0),
    )


def losses(output: Path) -> list[tuple[str, str]]:
    with (output / "losses.csv").open(newline="") as stream:
        return [(row["step"], row["loss"]) for row in csv.DictReader(stream)]


class InterruptedRunError(Exception):
    pass


@pytest.mark.parametrize("head", ["arcface", "cosface", "normface", "adacos", "adacos_fixed"])
def test_every_head_trains(folder: Path, tmp_path: Path, head: str) -> None:
    checkpoint = train_recogniser(tiny_run(folder, tmp_path / "run", epochs=2, head=head))
    assert checkpoint.step == 6
    assert len(losses(tmp_path / "run")) == 6


def test_a_run_cut_short_resumes_with_the_same_losses(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    whole = train_recogniser(tiny_run(folder, tmp_path / "whole"))

    def cut(count: int, batch_size: int, epoch: int, position: int, seed: int) -> NDArray[np.int64]:
        if (epoch, position) == (2, 1):
            raise InterruptedRunError
        return batch_rows(count, batch_size, epoch, position, seed)

    with monkeypatch.context() as patch:
        patch.setattr("training.loop.batch_rows", cut)
        with pytest.raises(InterruptedRunError):
            train_recogniser(tiny_run(folder, tmp_path / "cut"))
    resumed = train_recogniser(tiny_run(folder, tmp_path / "cut"))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    for name, value in whole.backbone.state_dict().items():
        assert torch.equal(value, resumed.backbone.state_dict()[name]), name
    assert torch.equal(whole.head.scale, resumed.head.scale)


def test_a_run_is_resumed_only_as_it_was_begun(folder: Path, tmp_path: Path) -> None:
    train_recogniser(tiny_run(folder, tmp_path / "run", epochs=1, head="cosface"))
    with pytest.raises(ConfigError, match=r"head\.name"):
        train_recogniser(tiny_run(folder, tmp_path / "run", epochs=1, head="arcface"))
    assert train_recogniser(tiny_run(folder, tmp_path / "run", epochs=2, head="cosface")).step == 6


def test_a_loss_that_is_not_finite_stops_the_run_and_says_where(folder: Path, tmp_path: Path) -> None:
    config = tiny_run(folder, tmp_path / "run", head="cosface")
    data = load_identities(config.data, tmp_path / "cache")
    head = build_head(config.head, 16, data.num_classes)
    with torch.no_grad():
        head.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteLossError, match="step 0: weight"):
        fit(build_backbone(TINY), head, data, config.loop, config.output)


def test_every_row_is_seen_once_an_epoch() -> None:
    rows = np.concatenate([batch_rows(23, 5, 3, position, 1) for position in range(4)])
    assert len(set(rows.tolist())) == 20
    assert not np.array_equal(batch_rows(23, 5, 0, 0, 1), batch_rows(23, 5, 1, 0, 1))


def test_the_learning_rate_warms_up_and_ends_at_zero() -> None:
    config = LoopConfig(learning_rate=0.1, warmup_steps=10)
    assert learning_rate(0, 100, config) == pytest.approx(0.01)
    assert learning_rate(9, 100, config) == pytest.approx(0.1)
    assert learning_rate(100, 100, config) == pytest.approx(0.0)


def test_augmentation_is_reproducible_and_keeps_the_range(rng: np.random.Generator) -> None:
    crops = to_tensor(rng.integers(0, 255, (16, 112, 112, 3), dtype=np.uint8))
    one = augment(crops, torch.Generator().manual_seed(3))
    two = augment(crops, torch.Generator().manual_seed(3))
    assert torch.equal(one, two)
    assert one.shape == crops.shape
    assert one.min() >= -1
    assert one.max() <= 1
    assert not torch.equal(one, crops)


def test_folder_and_manifest_are_read_alike(folder: Path) -> None:
    with (folder / "manifest.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["file", "identity"])
        for file in sorted(folder.glob("*/*.png")):
            writer.writerow([file.relative_to(folder), file.parent.name])
    by_folder = list_identities(DataConfig(folder, manifest=None))
    by_manifest = list_identities(DataConfig(folder))
    assert by_folder.files == by_manifest.files
    assert by_folder.labels.tolist() == by_manifest.labels.tolist()


@pytest.mark.parametrize("header", ["file,name", ""])
def test_a_manifest_without_its_columns(folder: Path, header: str) -> None:
    (folder / "manifest.csv").write_text(header + "\n")
    with pytest.raises(ConfigError, match="lacks the column"):
        list_identities(DataConfig(folder))


def test_people_with_too_few_images_are_left_out(folder: Path) -> None:
    shutil.rmtree(folder / "p0")
    (folder / "p1" / "0.png").unlink()
    assert list_identities(DataConfig(folder, manifest=None, min_images=4)).names == ("p2", "p3", "p4", "p5")
    with pytest.raises(ConfigError, match="fewer than two"):
        list_identities(DataConfig(folder, manifest=None, min_images=5))


def test_a_damaged_or_unaligned_image_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "p0" / "0.png").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=r"0\.png cannot be decoded"):
        load_identities(DataConfig(folder, manifest=None), tmp_path / "cache")
    cv2.imwrite(str(folder / "p0" / "0.png"), np.zeros((50, 50, 3), np.uint8))
    with pytest.raises(ConfigError, match="not a 112x112 crop"):
        load_identities(DataConfig(folder, manifest=None), tmp_path / "cache")


def test_photos_are_aligned_by_a_detector(
    tmp_path: Path,
    detector: Detector,
    astronaut: NDArray[np.uint8],
    actor: NDArray[np.uint8],
    nobody: NDArray[np.uint8],
) -> None:
    for name, photo in (("a", astronaut), ("b", actor)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i, image in enumerate((photo, photo[:, ::-1], nobody)):
            cv2.imwrite(str(tmp_path / "photos" / name / f"{i}.png"), cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    config = DataConfig(tmp_path / "photos", manifest=None, aligned=False)
    data = load_identities(config, tmp_path / "cache", detector)
    assert data.labels.tolist() == [0, 0, 1, 1]  # the photo without a face is dropped
    assert data.crops_NHWC.shape[1:] == (112, 112, 3)
    with pytest.raises(ConfigError, match="need a detector"):
        load_identities(replace(config, min_images=3), tmp_path / "cache")


@pytest.mark.parametrize(
    "make",
    [
        lambda: LoopConfig(epochs=0),
        lambda: LoopConfig(batch_size=1),
        lambda: HeadConfig(name="softmaxx"),  # type: ignore[arg-type]
        lambda: HeadConfig(scale=0),
        lambda: BackboneConfig(stem=4),
        lambda: DataConfig(Path("/no/such/folder")),
    ],
)
def test_bad_settings_are_refused_with_their_name(make: type) -> None:
    with pytest.raises(ConfigError, match=r"(loop|head|data|backbone)\."):
        make()


def test_recipes_are_complete(tmp_path: Path) -> None:
    for recipe in RECIPES.values():
        assert json.dumps(recipe(tmp_path, tmp_path / "out").as_dict())


def test_an_export_agrees_with_torch_and_is_small(tmp_path: Path, rng: np.random.Generator) -> None:
    crops = to_tensor(rng.integers(0, 255, (12, 112, 112, 3), dtype=np.uint8))
    backbone = ThinIResNet()
    backbone(crops)  # give batch norm statistics of its own
    worst = export_recogniser(backbone, crops, tmp_path / "r.onnx", {})
    assert worst >= 0.999
    assert (tmp_path / "r.onnx").stat().st_size < 4_000_000
    network = Network(tmp_path / "r.onnx")
    assert network.output_names == ["embedding"]
    with torch.no_grad():
        expected = backbone.eval()(crops).numpy()
    assert np.allclose(network.run(crops.numpy())[0], expected, atol=0.02)


def test_nothing_is_written_where_onnx_disagrees(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    crops = to_tensor(rng.integers(0, 255, (12, 112, 112, 3), dtype=np.uint8))
    monkeypatch.setattr("training.export.MIN_COSINE_FP16", 1.1)
    with pytest.raises(ParityError, match="fp16"):
        export_recogniser(ThinIResNet(), crops, tmp_path / "r.onnx", {})
    assert list(tmp_path.iterdir()) == []


def test_a_detector_exports_with_free_sides(tmp_path: Path) -> None:
    torch.manual_seed(0)
    export_detector(FaceDetector((4, 4, 8, 8, 8), 8), torch.randn(2, 3, 96, 160), tmp_path / "d.onnx", {})
    network = Network(tmp_path / "d.onnx")
    for height, width in ((64, 64), (256, 320), (640, 640)):
        outputs = network.run(np.zeros((1, 3, height, width), np.float32))
        assert [o.shape for o in outputs[:3]] == [(1, height // s * (width // s) * 2, 1) for s in (8, 16, 32)]


def test_detector_targets() -> None:
    boxes = torch.tensor([[20.0, 20, 52, 52], [100, 100, 228, 228], [2, 2, 20, 20]])
    faces = Faces(boxes, torch.zeros(3, 5, 2), torch.zeros(3, dtype=torch.bool), torch.tensor([False, False, True]))
    owners, ignored = assign(faces, 256, 256)
    assert set(owners.tolist()) == {-1, 0, 1}
    first = 32 * 32 * 2
    assert (owners[:first] == 0).any()
    assert not (owners[:first] == 1).any()  # a face of 128 pixels is no business of stride 8
    assert (owners[first:] == 1).any()
    assert ignored.any()
    assert not (ignored & (owners >= 0)).any()
    iou, giou = box_overlap(boxes[:2], boxes[[0, 0]])
    assert iou.tolist() == [1.0, 0.0]
    assert giou[1] < 0


def test_training_crops_carry_their_faces(astronaut: NDArray[np.uint8], detector: Detector) -> None:
    (found,) = detector.detect([astronaut])
    photo = AnnotatedPhoto(Path("a"), astronaut, found.boxes_xyxy[:1], found.landmarks_xy[:1], np.zeros(1, bool))
    rng = np.random.default_rng(4)
    checked = 0
    for _ in range(12):
        image, faces = training_crop(photo, 256, (60.0, 200.0), rng)
        again = detector.detect([image])[0]
        if len(faces.boxes) and not faces.ignore[0] and len(again):
            box = faces.boxes[0].numpy()
            if (box[:2] > 0).all() and (box[2:] < 256).all():
                side = float(box[2] - box[0])
                assert np.abs(again.boxes_xyxy[0] - box).max() < 0.25 * side
                assert np.abs(again.landmarks_xy[0] - faces.points[0].numpy()).max() < 0.25 * side
                checked += 1
    assert checked >= 4


def test_lfw_lists_have_their_published_sizes(data: Path) -> None:
    view2 = read_pairs(data / "lfw" / "pairs.txt")
    assert (len(view2.same), int(view2.same.sum()), len(np.unique(view2.folds))) == (6000, 3000, 10)
    for fold in range(10):
        assert view2.same[view2.folds == fold].sum() == 300
    assert len(read_pairs(data / "lfw" / "pairsDevTrain.txt").same) == 2200
    assert len(read_pairs(data / "lfw" / "pairsDevTest.txt").same) == 1000
