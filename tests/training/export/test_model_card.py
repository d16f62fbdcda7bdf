"""Metrics and card of a pack are updated without its run, if the provenance is complete."""

from __future__ import annotations

import json
import re
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
from training.config import ConfigError, HeadConfig, LoopConfig, TermConfig
from training.export.model_card import MASKED_PHOTOS, metric_rows, write_model_card
from training.export.packing import PackOptions, _describe_data, _reused_recognizer, refresh_pack
from training.recipes import RECIPES, recipe_overrides
from training.run.train import train_recognizer


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED_PACK, tmp_path / "pack"))


def test_new_figures_leave_the_rest_of_the_manifest_unchanged(copy: Path) -> None:
    before = json.loads((copy / "manifest.json").read_text())
    pack = update_manifest(copy, {**before["provenance"], "note": "Measured twice."}, {"face_sizes_found": {"16": 0.5}})
    after = json.loads((copy / "manifest.json").read_text())
    assert {k: v for k, v in after.items() if k not in ("provenance", "metrics")} == {
        k: v for k, v in before.items() if k not in ("provenance", "metrics")
    }
    assert pack.provenance["note"] == "Measured twice."
    assert metric_rows(pack.metrics) == [("Faces found at 640 px, by their longer side", "16 px 50%")]
    pack.verify()


def test_a_card_lists_groups_worst_pairs_and_settings(copy: Path) -> None:
    before = load_pack(copy)
    told = {**before.provenance["recognizer"], "data": {"images": 10, "people": 5, "terms": "Ask them."}}
    run = RECIPES["compact"](Path(), Path("runs/x"), None).shareable()
    run["head"]["options"]["margin"] = 0.5
    view2 = {"folds": [0.5, 0.75], "mean": 0.625, "std": 0.125}
    metrics = {
        "lfw_view2": {"accuracy": view2, "tar_at_far_1e3": 0.4, "eer": 0.2, "photos_without_face": 0},
        "lfw_splits": [
            {
                "by": "sharpness",
                "part": "to 3",
                "pairs": 7,
                "accuracy": 0.5,
                "interval": [0.4, 0.6],
                "fnmr": 0.5,
                "fmr": None,
            }
        ],
        "face_sizes_found": {"16": 0.5, "32": 0.9, "600": 0.05},
        "lfw_worst_pairs": {"mated": [["A/A_0001.jpg", "A/A_0002.jpg", 0.01]], "non_mated": [["A/A_1", "B/B_1", 0.9]]},
    }
    provenance = {**before.provenance, "recognizer": {**told, "run": run}, "note": "A note.", "log": "docs/log.md"}
    pack = update_manifest(copy, provenance, metrics)
    write_model_card(pack)
    card = (copy / "MODEL_CARD.md").read_text()
    for expected in (
        "| sharpness | to 3 | 7 | 50.0% (95 %: 40.0% to 60.0%) | 50.0% | - |",
        "By fold: 50.0%, 75.0%.",
        "| 0.010 | same person | A_0001.jpg, A_0002.jpg |",
        "| 0.900 | different people | A_1, B_1 |",
        "--output runs/compact \\\n    --set head.margin=0.5\n",
        "of these sizes (longer side, px): 16 (50%), 600 (5%).",
        "A note.\n",
        "docs/log.md",
        "Ask them.",
        "distilled from" if run["distill"]["teacher"] else "trained without a teacher",
    ):
        assert " ".join(expected.split()) in " ".join(card.split()), expected
    assert "{" not in card
    assert "Who is missed" not in card


def test_a_card_says_who_is_missed_once_groups_are_measured(copy: Path) -> None:
    def rate(value: float) -> list[float]:
        return [value, value / 2, 2 * value]

    def group(collection: str, kind: str, name: str, fmr: float) -> dict[str, object]:
        return {"collection": collection, "kind": kind, "group": name, "fmr": rate(fmr), "ratio": rate(fmr / 0.002)}

    figures = {
        "threshold": 0.8749,
        "misses": [
            {"photos": "LFW", "fnmr": rate(0.2), "fmr": rate(0.001)},
            {"photos": MASKED_PHOTOS, "fnmr": rate(0.4), "fmr": rate(0.003)},
            {"photos": "real mask with LFW", "fnmr": None, "fmr": rate(0.004)},
        ],
        "groups": [
            group("FairFace", "", "all", 0.002),
            group("FairFace", "age", "3-9", 0.008),
            group("FairFace", "age", "20-29", 0.001),
            group("FairFace", "race and gender", "White, male", 0.001),
            group("All-Age-Faces", "age", "2-12", 0.05),
        ],
    }
    before = load_pack(copy)
    write_model_card(update_manifest(copy, before.provenance, {**before.metrics, "groups": figures}))
    card = " ".join((copy / "MODEL_CARD.md").read_text().split())
    for expected in (
        "## Who is missed, who is confused",
        "(0.875)",
        "two people of LFW: 8.0 times (3-9 years, FairFace), 50.0 times (2-12 years, All-Age-Faces).",
        "raise FNMR from 20.0% to 40.0%.",
        "| real mask with LFW | - | 0.40% (95 %: 0.20% to 0.80%) |",
        "| 3-9 | 0.80% (95 %: 0.40% to 1.60%) | 4.00 |",
        "by age, gender, race or skin tone are unknown",
    ):
        assert expected in card, expected
    assert "White, male" not in card
    assert "| 2-12" not in card


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
        "5,000,000 aligned 112x112 crops of 90,000 people (badge_photos), trained without a teacher. Not stated",
        "Detector: 12 scenes, 3 portraits, 4 backgrounds. Not stated (`--detector-terms`)",
        "--data DATA/badge_photos --output runs/compact \\ --set 'backbone.widths=[16, 32, 64]'",
        "kith-train pack --recognizer runs/compact --detector-of PACK --data DATA --output OUTPUT \\ "
        "--name badges --precision fp32",
    ):
        assert own in words, own


def test_reused_networks_are_named_by_their_packs(copy: Path, pack: ModelPack) -> None:
    detector = pack.provenance["detector"]
    words = " ".join(card_of(own_pack(copy, {"pack": pack.model_id, **detector}, pack="source")).split())
    assert "Recognizer: from the pack source: 5,000,000" in words
    assert f"Detector: from the pack kith-compact: {detector['run']['photos']['scenes']} scenes" in words
    assert detector["terms"] in words
    assert "kith-train run" not in words
    assert "kith-train detector" not in words
    assert "kith-train pack --recognizer-of source --detector-of kith-compact" in words
    unknown = " ".join(card_of(own_pack(copy, {"pack": "scrfd"})).split())
    assert "Detector: from the pack scrfd: Not stated" in unknown


def test_options_describe_reused_networks(pack: ModelPack) -> None:
    """The pack of origin is the first one, through any number of copies."""
    kept = _reused_recognizer(pack, PackOptions())
    assert kept == {**pack.provenance["recognizer"], "pack": pack.model_id}
    again = replace(pack, model_id="copy", provenance={"recognizer": kept})
    stated = _reused_recognizer(again, PackOptions(terms="Ask us."))
    assert stated == {**kept, "data": {**kept["data"], "terms": "Ask us."}}


def test_a_run_that_is_no_recipe_has_no_command(copy: Path) -> None:
    made = own_pack(copy, {"run": {"teacher": "yunet-of-ours"}, "terms": "CC0."})
    recognizer = made.provenance["recognizer"]
    recognizer = {**recognizer, "run": {**recognizer["run"], "name": "ours"}}
    words = card_of(update_manifest(copy, {**made.provenance, "recognizer": recognizer}, {}))
    assert "kith-train run" not in words
    assert "# runs/ours is no recipe: manifest.json has its settings" in words
    assert "kith-train detector" not in words


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


def test_the_card_of_the_bundled_pack_is_the_one_that_is_generated(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_PACK, tmp_path / BUNDLED_PACK.name)
    card = (BUNDLED_PACK / "MODEL_CARD.md").read_text()
    assert card_of(load_pack(tmp_path / BUNDLED_PACK.name)) == card
    assert "610 people with one photo each, 4,397 mated" in " ".join(card.split())
    assert "Files in" not in card  # its variants have none
    # Its trainers are no longer here.
    commands = r"^git checkout [0-9a-f]{40} # .*\nkith-train detector .+\nkith-train imitate .+\nkith-train pack .+"
    assert re.search(commands, card, re.MULTILINE)


def test_a_pack_describes_the_photos_of_its_training(tmp_path: Path) -> None:
    """Not those of the folder, which changed since."""
    config = tiny_run(write_people(tmp_path / "people"), tmp_path / "run", "cosface", epochs=1)
    train_recognizer(config)
    shutil.rmtree(tmp_path / "people" / "p0")
    shutil.copy(tmp_path / "people" / "p1" / "0.png", tmp_path / "people" / "p1" / "9.png")
    assert _describe_data(config.output, config, "CC0") == {"images": PEOPLE * IMAGES, "people": PEOPLE, "terms": "CC0"}


def test_commands_list_settings_that_differ_from_the_recipe(tmp_path: Path) -> None:
    plain = RECIPES["compact"](Path(), Path("runs/x"), None)
    assert recipe_overrides(plain.shareable()) == []
    other = replace(
        plain,
        head=HeadConfig("arcface", {"margin": 0.4}),
        terms=(TermConfig("intra", 0.5),),
        loop=replace(LoopConfig(epochs=8, margin_warmup=0.2), epochs=20),
    )
    named = recipe_overrides(other.shareable())
    assert set(named) == {"head.name=arcface", "head.margin=0.4", "terms.intra=0.5", "loop.epochs=20"}
    again = plain.overridden(dict(setting.split("=", 1) for setting in named))
    assert again == other
    assert recipe_overrides({**plain.shareable(), "name": "another"}) == []
    taught = RECIPES["compact"](Path(), Path("runs/x"), tmp_path)
    assert recipe_overrides(taught.shareable()) == []  # the command names the teacher by itself


def test_a_pack_without_provenance_is_not_refreshed(copy: Path, reference: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no provenance of its run"):
        refresh_pack(reference, tmp_path)
    with pytest.raises(PackError, match="only packs with a manifest can be updated"):
        update_manifest(reference, {}, {})
