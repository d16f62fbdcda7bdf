"""Metrics and card of a pack are updated without its run, if the provenance is complete."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from models.errors import PackError
from models.pack.loading import BUNDLED_PACK, load_pack
from models.pack.manifest import ModelPack
from models.pack.writing import update_manifest
from tests.packs import pack_with_int8
from tests.training.runs import IMAGES, PEOPLE, tiny_run, write_people
from training.config import ConfigError
from training.export.model_card import metric_rows, write_model_card
from training.export.packing import PackOptions, _describe_data, _reused_recognizer, refresh_pack
from training.recipes import RECIPES
from training.run.train import train_recognizer

METRICS = {"lfw_view1": {"accuracy": {"mean": 0.5}}}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED_PACK, tmp_path / "pack"))


def test_new_figures_leave_the_rest_of_the_manifest_unchanged(copy: Path) -> None:
    before = json.loads((copy / "manifest.json").read_text())
    pack = update_manifest(copy, {**before["provenance"], "note": "Measured twice."}, METRICS)
    after = json.loads((copy / "manifest.json").read_text())
    assert {k: v for k, v in after.items() if k not in ("provenance", "metrics")} == {
        k: v for k, v in before.items() if k not in ("provenance", "metrics")
    }
    assert pack.provenance["note"] == "Measured twice."
    assert metric_rows(pack.metrics) == [("LFW View 1 test accuracy (its own best threshold)", "50.00%")]
    pack.verify()


def test_a_card_lists_figures_terms_and_notes(copy: Path) -> None:
    before = load_pack(copy)
    told = {**before.provenance["recognizer"], "data": {"images": 10, "people": 5, "terms": "Ask them."}}
    run = RECIPES["compact"](Path(), Path("runs/x"), None).shareable()
    run["head"]["options"]["margin"] = 0.5
    view2 = {"folds": [0.5, 0.75], "mean": 0.625, "std": 0.125}
    metrics = {
        "lfw_view2": {"accuracy": view2, "tar_at_far_1e3": 0.4, "eer": 0.2, "photos_without_face": 0},
    }
    provenance = {**before.provenance, "recognizer": {**told, "run": run}, "note": "A note.", "log": "docs/log.md"}
    pack = update_manifest(copy, provenance, metrics)
    write_model_card(pack)
    card = (copy / "MODEL_CARD.md").read_text()
    for expected in (
        "| LFW View 2 accuracy | 62.50% ± 12.50% |",
        "settings of the run, of the recipe compact.",
        "A note.\n",
        "docs/log.md",
        "Ask them.",
        "distilled from" if run["distill"]["teacher"] else "trained without a teacher",
    ):
        assert " ".join(expected.split()) in " ".join(card.split()), expected
    assert "{" not in card


def own_pack(copy: Path, detector: dict[str, object], **changes: object) -> ModelPack:
    """Return a copy of the bundled pack with the provenance of another run and detector, without variants."""
    document = json.loads((copy / "manifest.json").read_text())
    document |= {"model_id": "badges", "display_name": "Badges", "variants": {}}
    (copy / "manifest.json").write_text(json.dumps(document))
    (copy.parent / "badge_photos").mkdir(exist_ok=True)
    config = RECIPES["compact"](copy.parent / "badge_photos", Path("runs/x"), None)
    config = replace(config, backbone=replace(config.backbone, widths=(16, 32, 64)))
    data = {"images": 5_000_000, "people": 90_000, "terms": None}
    recognizer = {"run": config.shareable(), "data": data, "precision": "fp32", "center": 0.0, **changes}
    return update_manifest(copy, {"recognizer": recognizer, "detector": detector, "note": "", "log": None}, {})


def card_of(pack: ModelPack) -> str:
    write_model_card(pack)
    return (pack.directory / "MODEL_CARD.md").read_text()


def test_a_card_states_no_facts_of_the_bundled_pack(copy: Path) -> None:
    photos = {"scenes": 12, "portraits": 3, "backgrounds": 4}
    run = {"photos": photos, "teacher": "yunet-of-ours"}
    card = card_of(own_pack(copy, {"run": run, "terms": None}))
    words = " ".join(card.split())
    for bundled in (
        "649",
        "450",
        "CelebA",
        "FairFace",
        "dlib",
        "WIDER FACE",
        "kith-compact",
        "Kith compact",
        "models/packs",
        "YuNet's, which",
        "No network was trained",
        "5,749",
        "610 people",
        "4,397",
        "4,069",
        "the 74",
        "576",
        "misses masked",
        "far better",
        "its teacher",
        "evaluate Kith",
        "compact face detector",
        "TERMS",
    ):
        assert bundled not in words, bundled
    for own in (
        "5,000,000 aligned crops of 90,000 people (badge_photos), trained without a teacher. Not stated",
        "Detector: 12 scenes, 3 portraits, 4 backgrounds. Not stated (`--detector-terms`)",
    ):
        assert own in words, own


def test_reused_networks_are_named_by_their_packs(copy: Path, pack: ModelPack) -> None:
    detector = pack.provenance["detector"]
    words = " ".join(card_of(own_pack(copy, {"pack": pack.model_id, **detector}, pack="source")).split())
    assert "Recognizer: from the pack source: 5,000,000" in words
    assert f"Detector: from the pack kith-compact: {detector['run']['photos']['scenes']} scenes" in words
    assert detector["terms"] in words
    unknown = " ".join(card_of(own_pack(copy, {"pack": "scrfd"})).split())
    assert "Detector: from the pack scrfd: Not stated" in unknown


def test_options_describe_reused_networks(pack: ModelPack) -> None:
    """The pack of origin is the first one, through any number of copies."""
    kept = _reused_recognizer(pack, PackOptions())
    assert kept == {**pack.provenance["recognizer"], "pack": pack.model_id}
    again = replace(pack, model_id="copy", provenance={"recognizer": kept})
    stated = _reused_recognizer(again, PackOptions(terms="Ask us."))
    assert stated == {**kept, "data": {**kept["data"], "terms": "Ask us."}}


def test_a_card_shows_variants_that_were_measured_on_photos(copy: Path) -> None:
    published = pack_with_int8(copy.parent / "quantized")
    document = json.loads((published / "manifest.json").read_text())
    entry = document["variants"]["recognition"]["int8"]
    measured = {
        "photos": "badge photos",
        "engines": {"onnxruntime": {"cosine": {"mean": 0.9995, "worst": 0.99}, "accepted": True}},
    }
    document["variants"] = {"recognition": {"int8": {**entry, "measured": measured}}}
    (published / "manifest.json").write_text(json.dumps(document))
    words = " ".join(card_of(load_pack(published)).split())
    assert "`kith models quantize` wrote and measured these INT8 files on photos without names (badge photos)." in words
    assert "| recognizer, int8, onnxruntime | cosine to fp32 0.99950, at worst 0.9900 |" in words
    assert "measured on LFW and WIDER FACE" not in words


def test_a_pack_describes_the_photos_of_its_training(tmp_path: Path) -> None:
    """Not those of the folder, which changed since."""
    config = tiny_run(write_people(tmp_path / "people"), tmp_path / "run", "cosface", epochs=1)
    train_recognizer(config)
    shutil.rmtree(tmp_path / "people" / "p0")
    shutil.copy(tmp_path / "people" / "p1" / "0.png", tmp_path / "people" / "p1" / "9.png")
    assert _describe_data(config.output, config, "CC0") == {"images": PEOPLE * IMAGES, "people": PEOPLE, "terms": "CC0"}


def test_a_pack_without_provenance_is_not_refreshed(copy: Path, reference: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no provenance of its run"):
        refresh_pack(reference, tmp_path)
    with pytest.raises(PackError, match="only packs with a manifest can be updated"):
        update_manifest(reference, {}, {})
