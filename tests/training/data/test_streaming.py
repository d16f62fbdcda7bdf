"""Streamed crops train with the losses of a decoded cache, resume by step, and report damaged images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.mxnet_files import write_faces, write_shard
from tests.training.runs import IMAGES, PEOPLE, SIDE, losses, tiny_run, write_people
from training.config import ConfigError, DataConfig, RunConfig
from training.data.batches import Batches
from training.data.identities import load_identities
from training.run.train import train_recognizer


def write_shards(folder: Path, people: Path) -> Path:
    for shard in range(2):
        files = [(f"{file.parent.name}-{file.stem}", file) for file in sorted(people.rglob("*.png"))[shard::2]]
        pairs = [(f"{name}.png", file.read_bytes()) for name, file in files]
        pairs += [(f"{name}.cls", file.parent.name[1:].encode()) for name, file in files]
        write_shard(folder / f"{shard:03}.tar", pairs)
    return folder


def with_workers(config: RunConfig, root: Path, workers: int = 2) -> RunConfig:
    return replace(config, data=DataConfig(root, manifest=None, crop_px=SIDE, workers=workers))


@pytest.mark.parametrize("kind", ["folder", "records", "shards"])
def test_a_streamed_run_has_the_losses_of_a_cached_one(tmp_path: Path, kind: str) -> None:
    people = root = write_people(tmp_path / "people")
    if kind == "records":
        files = sorted(people.rglob("*.png"))
        root = tmp_path / "train.rec"
        write_faces(root, [file.read_bytes() for file in files], [int(file.parent.name[1:]) for file in files])
    elif kind == "shards":
        root = write_shards(tmp_path / "shards", people)
    cached = with_workers(tiny_run(people, tmp_path / "cached", epochs=2), root, workers=0)
    train_recognizer(cached)
    streamed = with_workers(tiny_run(people, tmp_path / "streamed" / "run", epochs=2), root)
    train_recognizer(streamed)
    assert not list((tmp_path / "streamed").glob("cache/crops-*"))
    assert losses(streamed.output) == losses(cached.output)


def test_batches_depend_on_the_step_alone(tmp_path: Path) -> None:
    people = write_people(tmp_path / "people")
    config = with_workers(tiny_run(people, tmp_path / "run", epochs=2), people)
    cached = with_workers(config, people, workers=0)
    sets = [load_identities(c.data, tmp_path / "cache") for c in (config, cached)]
    assert len(sets[0]) == PEOPLE * IMAGES
    assert np.array_equal(sets[0].crops_NHWC[3:9], sets[1].crops_NHWC[3:9])
    whole = list(Batches(sets[1], cached, slice(0, 8), torch.device("cpu")).iterate(0))
    resumed = list(Batches(sets[0], config, slice(0, 8), torch.device("cpu")).iterate(3))
    assert [batch.step for batch in resumed] == [3, 4, 5]
    assert not torch.equal(whole[0].uniforms, whole[1].uniforms)
    for one, other in zip(whole[3:], resumed, strict=True):
        assert np.array_equal(one.rows, other.rows)
        assert torch.equal(one.crops, other.crops)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.uniforms, other.uniforms)


def test_damaged_input_is_named(tmp_path: Path) -> None:
    people = write_people(tmp_path / "people")
    config = with_workers(tiny_run(people, tmp_path / "run"), people)
    data = load_identities(config.data, tmp_path / "cache")
    (people / "p3" / "1.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"p3/1\.png cannot be decoded"):
        list(Batches(data, config, slice(0, 8), torch.device("cpu")).iterate(0))
    with pytest.raises(ConfigError, match="aligned crops only"):
        DataConfig(people, None, aligned=False, workers=1)
