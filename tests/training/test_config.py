"""Settings are validated by name, overridden by text, and round-trip through JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from training.config import ConfigError, DataConfig, HeadConfig, LoopConfig, RunConfig, TermConfig, read_settings
from training.losses import build_head, build_term
from training.optimization.loop import learning_rate
from training.recipes import PUBLISHED_LOSSES, RECIPES, compared, shipped_sets

ARCFACE = HeadConfig("arcface", {"scale": 64.0, "margin": 0.5})
COSFACE = HeadConfig("cosface", {"scale": 64.0, "margin": 0.4})


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig("a", tmp_path / "out", DataConfig(tmp_path), head=HeadConfig("arcface", {"margin": 0.3}))


def test_a_run_is_written_and_read_back(config: RunConfig) -> None:
    document = json.loads(json.dumps(config.as_dict()))
    assert RunConfig.from_dict(document) == config
    for recipe in RECIPES.values():
        made = recipe(config.data.root, config.output, config.data.root)
        assert made.distill.teacher == config.data.root
        assert RunConfig.from_dict(made.as_dict()) == made
    document["loop"]["epoch"] = 3
    with pytest.raises(ConfigError, match=r"loop\.epoch"):
        RunConfig.from_dict(document)
    with pytest.raises(ConfigError, match=r"loop\.epochs"):  # also where it is made
        LoopConfig(epochs=0)


def test_settings_are_overridden_by_text(config: RunConfig) -> None:
    changed = config.overridden(
        {
            "loop.epochs": "3",
            "loop.optimizer": "adamw",
            "head.margin": "0.4",
            "head.scale": "32",
            "terms.intra": "0.5",
            "terms.triplet.margin": "0.2",
            "backbone.widths": "[16, 16, 24]",
            "data.max_identities": "null",
            "augment.mask": "0.1",
            "distill.teacher": str(config.data.root),
        }
    )
    assert (changed.loop.epochs, changed.loop.optimizer) == (3, "adamw")
    assert changed.head.options == {"margin": 0.4, "scale": 32}
    assert changed.terms == (TermConfig("intra", 0.5), TermConfig("triplet", 1.0, {"margin": 0.2}))
    assert changed.backbone.widths == (16, 16, 24)
    assert changed.augment.mask == 0.1
    assert changed.distill.teacher == config.data.root
    assert changed.overridden({"terms.intra": "0"}).terms == (TermConfig("triplet", 1.0, {"margin": 0.2}),)
    assert config.overridden({"head.scale": "20", "head.name": "cosface"}).head == HeadConfig("cosface", {"scale": 20})
    assert config.overridden({"name": "b"}).name == "b"
    # Options of another head must not carry over.
    assert changed.overridden({"head.name": "cosface"}).head == HeadConfig("cosface")
    assert config == config.overridden({})


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("loop.epoch", "3", r"unknown setting 'loop.epoch'. Did you mean loop.epochs\?"),
        ("loop.epochs", "many", "loop.epochs"),
        ("loop.batch_size", "1", "loop.batch_size: Input should be greater than or equal to 2, not 1"),
        ("loop.milestones", "[0.5, 1.0]", "loop.milestones"),
        ("loops.epochs", "1", r"Did you mean loop\.epochs\?"),
        ("backbone.widths", "[8]", "backbone.widths"),
        ("backbone.dropout", "0.4", "backbone.dropout: thin_iresnet has no dropout"),
        ("augment.rotation_deg", "90", "augment.rotation_deg"),
        ("terms.intra", "-1", "terms.0.weight"),
        ("distill.teacher", "/no/such/teacher", "distill.teacher /no/such/teacher does not exist"),
        ("data.root", "/no/such", "data.root /no/such does not exist"),
        ("data.held_out_people", "0.6", "data.held_out_people"),
        ("validation", "/no/such.bin", "validation.0: Path does not point to a file, not /no/such.bin"),
        ("data.images_per_person", "3", "multiple of 3"),
        ("data.crop_px", "150", "multiple of 16 for a network, not 150"),
    ],
)
def test_unknown_and_invalid_settings_are_named(config: RunConfig, key: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.overridden({key: text})


def test_a_file_has_the_settings_of_the_command_line(config: RunConfig, tmp_path: Path) -> None:
    path, sets = tmp_path / "mine.json", tmp_path / "a.bin"
    sets.write_bytes(b"")
    path.write_text('{"loop": {"epochs": 3, "learning_rate": 1e-3}, "head.name": "arcface", "terms": {"intra": 0.5}}')
    made = config.overridden(read_settings(path))
    assert (made.loop.epochs, made.loop.learning_rate, made.head.name) == (3, 0.001, "arcface")
    path = tmp_path / "mine.yaml"
    path.write_text(
        "# mine\nloop:\n  epochs: 3\n  learning_rate: 1e-3\nhead.name: arcface\nterms: {intra: 0.5}\n"
        f"validation: [{sets}]\ndata: {{max_identities: null}}\n"
    )
    assert config.overridden(read_settings(path)) == replace(made, validation=(sets,))
    for text in ("loop: [", "- 1", ""):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"mine\.yaml"):
            read_settings(path)


@pytest.mark.parametrize(
    ("name", "head", "published"),
    [
        ("ms1mv3-r50", ARCFACE, ("iresnet50", 1024, 5e-4, 1.0, 0.0, 0.1)),
        ("ms1mv3-r100", ARCFACE, ("iresnet100", 1024, 5e-4, 1.0, 0.0, 0.1)),
        ("glint360k", COSFACE, ("iresnet100", 1024, 1e-4, 1.0, 0.0, 0.1)),
        ("webface42m", COSFACE, ("iresnet100", 4096, 5e-4, 0.2, 0.05, 0.3)),
    ],
)
def test_published_recipes_have_the_published_schedule(
    tmp_path: Path, name: str, head: HeadConfig, published: tuple[str, int, float, float, float, float]
) -> None:
    made = RECIPES[name](tmp_path, tmp_path / "run", None)
    loop, (*_, warmup, rate) = made.loop, published
    found = (made.backbone.name, loop.batch_size, loop.weight_decay, loop.class_sampling, loop.warmup)
    assert (made.head, found, loop.epochs, made.backbone.embedding_dim) == (head, published[:-1], 20, 512)
    # The rate falls linearly to 0 after the warm-up.
    rates = [learning_rate(step, 1000, loop) for step in (999, 525, round(1000 * warmup))]
    assert rates == pytest.approx([rate * 1 / (1000 - 1000 * warmup), rate * 475 / (1000 - 1000 * warmup), rate])


def test_sets_beside_a_record_file_are_validated(tmp_path: Path) -> None:
    for name in ("train.rec", "lfw.bin", "agedb_30.bin", "other.bin"):
        (tmp_path / name).write_bytes(b"")
    assert shipped_sets(tmp_path / "train.rec") == (tmp_path / "lfw.bin", tmp_path / "agedb_30.bin")
    assert shipped_sets(tmp_path) == ()


def test_shared_settings_contain_no_paths(config: RunConfig, tmp_path: Path) -> None:
    shared = config.shareable()
    assert "output" not in shared
    assert str(tmp_path.parent) not in json.dumps(shared)


@pytest.mark.parametrize("loss", PUBLISHED_LOSSES)
def test_every_compared_loss_can_be_built(loss: str, tmp_path: Path) -> None:
    config = compared(loss, tmp_path, tmp_path / "out")
    head = build_head(config.head, 16, 10)
    for term in config.terms:
        build_term(term, head, 16, 10)
