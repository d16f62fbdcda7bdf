"""Metrics and card of a pack are updated without its run, if the provenance is complete."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from models.errors import PackError
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import INT8_FILE, ModelPack
from models.pack.writing import replace_calibration, update_manifest, write_verified
from tests.packs import pack_with_int8
from tests.training.runs import IMAGES, PEOPLE, tiny_run
from training.evaluation.figures import MEASURES, metric_rows
from training.export import packing
from training.export.model_card import write_model_card
from training.export.packing import _describe_data, refresh_pack
from training.recipes import RECIPES


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED_PACK, tmp_path / "pack"))


def test_new_figures_replace_the_old_ones_and_nothing_else(
    copy: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundled card has sections, rows and terms that no command writes."""
    view2 = {"folds": [0.5, 0.75], "mean": 0.625, "std": 0.125}
    metrics = {
        "lfw_view2": {"accuracy": view2, "tar_at_far_1e3": 0.4, "eer": 0.2, "photos_without_face": 0},
        "lfw_view1": {"accuracy": {"mean": 0.5}},
    }
    monkeypatch.setattr(packing, "evaluate_pack", lambda pack, data, cache: metrics)
    calibration = json.loads((copy / "calibration.json").read_text())
    replace_calibration(load_pack(copy), {**calibration, "data": "staff", "people": 12_345})
    card, before = (copy / "MODEL_CARD.md").read_text(), json.loads((copy / "manifest.json").read_text())
    card = card.replace("| LFW View 2 EER |", "| Mine |")
    (copy / "MODEL_CARD.md").write_text(card)
    refresh_pack(copy, Path()).verify()
    after = json.loads((copy / "manifest.json").read_text())
    assert {**after, "metrics": before["metrics"]} == before
    old, new = card.splitlines(), (copy / "MODEL_CARD.md").read_text().splitlines()
    gone, added = ([line for line in one if line not in other] for one, other in ((old, new), (new, old)))
    assert all(line.startswith(("| LFW View", "- Calibration: ", "  pairs)", "  impostor")) for line in gone), gone
    assert {"| LFW View 2 accuracy | 62.50% ± 12.50% |", "| LFW View 2 EER | 20.00% |"} < {*added}
    assert "- Calibration: staff (" in "\n".join(added) and "12,345 people" in "\n".join(added)
    assert "## Who is missed, who is confused" in new
    with pytest.raises(PackError, match="only packs with a manifest can be updated"):
        refresh_pack(reference, Path())


def test_a_card_lists_figures_and_terms(copy: Path) -> None:
    before = load_pack(copy)
    told = {**before.provenance["recognizer"], "data": {"images": 10, "people": 5, "terms": "Ask them."}}
    run = RECIPES["compact"](Path(), Path("runs/x"), None).shareable()
    card = card_of(update_manifest(copy, {**before.provenance, "recognizer": {**told, "run": run}}, before.metrics))
    for expected in (
        *(f"| {name} | " for name in MEASURES),
        "610 people with one photo each, 4,397 mated probes, 4,069 strangers",
        "74 validation photos",
        "settings of the run, of the recipe compact.",
        "10 aligned crops of 5 people, trained without a teacher. Ask them.",
        "- Calibration: LFW View 1 (",
        "| recognizer.onnx | ",
    ):
        assert expected in " ".join(card.split()), expected
    assert "{" not in card


def test_figures_have_the_intervals_that_were_measured(pack: ModelPack) -> None:
    metrics = json.loads(json.dumps(pack.metrics))
    (low, high), rows = metrics["lfw_view2"]["intervals"]["accuracy"], dict(metric_rows(metrics))
    assert rows["LFW View 2 accuracy"].endswith(f"(95 %: {low:.2%} to {high:.2%})")
    assert "LFW open set FNIR at FPIR 0.1% without five doubtful strangers" in rows
    del metrics["lfw_view2"]["intervals"], metrics["lfw_open_set"]["fnir_without_doubtful"]
    bare = dict(metric_rows(metrics))
    assert "95 %" not in bare["LFW View 2 accuracy"]
    assert not any("doubtful" in name for name in bare)


def own_pack(copy: Path, detector: dict[str, object]) -> ModelPack:
    """Return a copy of the bundled pack with the provenance of another run and detector."""
    document = json.loads((copy / "manifest.json").read_text())
    document |= {"model_id": "badges", "display_name": "Badges"}
    (copy / "manifest.json").write_text(json.dumps(document))
    (copy.parent / "badge_photos").mkdir(exist_ok=True)
    run = RECIPES["compact"](copy.parent / "badge_photos", Path("runs/x"), None).shareable()
    recognizer = {"run": run, "data": {"images": 5_000_000, "people": 90_000, "terms": None}, "precision": "fp32"}
    return update_manifest(copy, {"recognizer": recognizer, "detector": detector}, {})


def card_of(pack: ModelPack) -> str:
    write_model_card(pack)
    return (pack.directory / "MODEL_CARD.md").read_text()


def test_a_card_states_no_facts_of_the_bundled_pack(copy: Path) -> None:
    run = {"photos": {"scenes": 12, "portraits": 3, "backgrounds": 4}, "teacher": "yunet-of-ours"}
    words = " ".join(card_of(own_pack(copy, {"run": run, "terms": None})).split())
    for foreign in ("CelebA", "WIDER FACE", "610 people", "kith-compact", "far better"):
        assert foreign not in words
    for own in (
        "5,000,000 aligned crops of 90,000 people (badge_photos), trained without a teacher. Not stated",
        "Detector: 12 scenes, 3 portraits, 4 backgrounds. Not stated: the terms of its",
    ):
        assert own in words, own


def test_a_pack_describes_the_photos_of_its_training(finished: Path, tmp_path: Path) -> None:
    """Not those of the folder, which changed since."""
    shutil.copytree(finished / "run", tmp_path / "run")
    shutil.copytree(finished / "people" / "p1", tmp_path / "people" / "p1")
    config = tiny_run(tmp_path / "people", tmp_path / "run")
    assert _describe_data(config.output, config, "CC0") == {"images": PEOPLE * IMAGES, "people": PEOPLE, "terms": "CC0"}


def test_an_int8_file_of_another_network_is_not_listed(tmp_path: Path) -> None:
    directory = pack_with_int8(tmp_path / "pack")
    before = json.loads((directory / INT8_FILE).read_text())
    with pytest.raises(PackError, match=r"int8\.recognition\.of"):
        write_verified(directory / INT8_FILE, {"recognition": {**before["recognition"], "of": "0" * 64}})
    assert json.loads((directory / INT8_FILE).read_text()) == before
    assert load_pack(directory).recognition.int8
