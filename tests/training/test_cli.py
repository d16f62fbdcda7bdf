"""Error messages and output of `kith-train`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.pack.loading import BUNDLED_PACK
from models.vision.detection import Detector
from tests.conftest import ROOT
from tests.training.runs import call, write_people
from training.cli import commands
from training.config import ConfigError, RunConfig
from training.errors import RunInterruptedError
from training.losses import HEADS, TERMS
from training.optimization.run_folder import CHECKPOINT, read_run_config, write_run_config
from training.recipes import RECIPES, sized


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("evaluate", "."), "Name a benchmark"),
        (("run", "large", "--data", ".", "--output", "runs/x"), "unknown recipe 'large'. Recipes: few, few-labels"),
        (("compare", "softmaxx", "--data", ".", "--output", "runs"), "unknown loss softmaxx"),
        (("evaluate", ".", "--probes", "."), "need each other"),
        (("evaluate", "a.onnx", "--data", "."), "needs a run or a pack"),
        (("evaluate", ".", "--bin", "a.bin", "--flip"), "--flip would need a run"),
        (("evaluate", ".", "--bin", "a.bin", "--pack", "."), "--pack would need a run"),
        (("evaluate", ".", "--bin", "a.bin", "--report", "r.json"), "--report would need a run, --people or --data"),
        (("evaluate", ".", "--data", ".", "--view1", "--report", "r.json"), "Leave out --view1"),
        (("evaluate", ".", "--data", ".", "--report", "r.html"), "--report must end with .json"),
        (("evaluate", ".", "--bin", "a.bin", "--view1"), "need --data"),
        (("evaluate", ".", "--bin", "a.bin", "--refined", "r"), "need --probes"),
        (("evaluate", ".", "--bin", "a.bin", "--frames", "20"), "need --ytf or --iqiyi"),
        (("evaluate", ".", "--bin", "a.bin", "--features", "f"), "need --trillion-pairs"),
        (("evaluate", ".", "--bin", "a.bin", "--norms"), "need a run and --ijb"),
        (("evaluate", ".", "--data", ".", "--worst-pairs", "w.png"), "need --people"),
        (("evaluate", ".", "--data", ".", "--refresh", "--view1"), "--refresh needs a pack"),
        (
            ("compare", "cosface", "--data", ".", "--output", "runs", "--grid", "a.b=1", "--grid", "a.b=2"),
            "names a setting twice",
        ),
        (("bounds", "--classes", "10", "--probability", "1"), "between 0 and 1"),
    ],
)
def test_invalid_arguments_are_rejected(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        call(*words)
    assert list(tmp_path.rglob("*.pt")) == []


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunConfig, Detector | None]]:
    """Settings and detector of each run, which is begun and stopped."""
    runs = list[tuple[RunConfig, Detector | None]]()

    def begin(config: RunConfig, detector: Detector | None) -> None:
        write_run_config(config.output, config.as_dict(), config.output / CHECKPOINT, ())
        (config.output / CHECKPOINT).touch()
        runs.append((config, detector))
        raise RunInterruptedError("stopped")

    monkeypatch.setattr(commands, "train_recognizer", begin)
    return runs


def stop(*words: object) -> None:
    with pytest.raises(RunInterruptedError):
        call(*words)


def test_the_number_of_photos_chooses_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: list[tuple[RunConfig, Detector | None]]
) -> None:
    monkeypatch.chdir(tmp_path)
    people = write_people(tmp_path / "people", images=8, side=112)
    stop("run", "--data", "people", "--epochs", "1")
    few = read_run_config(tmp_path / "runs" / "people")
    assert (few.name, few.loop.batch_size, few.loop.epochs, few.distill.teacher) == ("few", 16, 1, BUNDLED_PACK)
    assert few.data.manifest is None and few.data.aligned
    for i in range(600):  # the same command goes on, though so many would get larger batches
        os.link(people / "p0" / "0.png", people / "p1" / f"more{i}.png")
    stop("run", "--data", "people", "--epochs", "1")
    assert read_run_config(tmp_path / "runs" / "people") == few
    monkeypatch.setattr(commands, "SMALL_SET_IMAGES", 20)
    stop("run", "--data", "people", "--output", "runs/large")
    stop("run", "few", "--data", "people", "--output", "runs/named")
    stop("run", "few-labels", "--data", "people", "--output", "runs/labels")
    assert [config.name for config, _ in begun[2:]] == ["compact", "few", "few-labels"]
    assert (begun[4][0].loop.batch_size, begun[4][0].distill.teacher) == (32, None)


def test_the_bundled_pack_aligns_photos_that_are_no_crops(
    tmp_path: Path, begun: list[tuple[RunConfig, Detector | None]]
) -> None:
    people = write_people(tmp_path / "people", side=144)
    cases: list[tuple[list[object], bool]] = [
        ([], False),
        (["--set", "data.crop_px=144"], True),
        (["--align-with", BUNDLED_PACK], False),
    ]
    for i, (words, aligned) in enumerate(cases):
        stop("run", "--data", people, "--output", tmp_path / f"run{i}", *words)
        assert (begun[i][0].data.aligned, begun[i][1] is None) == (aligned, aligned)


@pytest.mark.parametrize(
    ("people", "images", "batch", "epochs", "scale"),
    [(10, 50, 16, 40, 10), (300, 1000, 32, 40, 10), (300, 5093, 64, 27, 10), (2000, 60_000, 64, 8, 10.7)],
)
def test_few_photos_get_small_batches_and_many_epochs(
    tmp_path: Path, people: int, images: int, batch: int, epochs: int, scale: float
) -> None:
    config = sized(RECIPES["few"](tmp_path, tmp_path / "run", None), people, images)
    assert (config.loop.batch_size, config.loop.epochs, config.head.options["scale"]) == (batch, epochs, scale)
    assert config.loop.learning_rate == pytest.approx(0.004 * batch / 64)


@pytest.mark.parametrize(
    ("size_kb", "file"),
    [
        pytest.param(1000, "crops-", marks=pytest.mark.long),
        pytest.param(1776, "error: No", marks=pytest.mark.long),
        (4000, "checkpoint.pt"),
    ],
    ids=["cache", "logs", "checkpoint"],
)
def test_a_full_disk_is_one_line(tmp_path: Path, size_kb: int, file: str) -> None:
    """On a file system of its own, the cache of 1,768 kB, then the logs, then the checkpoint of 18 MB fails."""
    disk, people = tmp_path / "disk", write_people(tmp_path / "people", images=8, side=112)
    disk.mkdir()
    program = Path(sys.executable).parent / "kith-train"
    run = f"{program} run smoke --data {people} --folder --output {disk}/run --epochs 1"
    script = f"mount -t tmpfs -o size={size_kb}k tmpfs {disk} || exit 77; {run}; code=$?; find {disk}; exit $code"
    try:
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=300, check=False
        )
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("mounting a file system is not permitted")
    message = done.stderr[done.stderr.find("error:") :].strip()
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert file in message.partition(" space left on device")[0]
    assert message.endswith(
        "Free space on the disk, then run the command again; a run resumes from its last checkpoint"
    )
    assert ".partial" not in done.stdout


def test_losses_and_bounds_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    call("losses")
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*HEADS, *TERMS, "margin=0.35"))
    call("bounds", "--classes", "10")
    assert "inflection" not in capsys.readouterr().out


STOPPED = """
from training.cli import commands
from training.errors import RunInterruptedError
def stop(*_): raise RunInterruptedError("stopped. Resume with: kith-train resume x")
commands.train_recognizer = stop
"""


@pytest.mark.parametrize(
    ("words", "before", "code", "said"),
    [
        (("bounds", "--classes", "10575"), "", 0, "s of an inflection of P at 45 degrees │ 12.79"),
        (("resume", "."), "", 2, "error: config.json does not exist: train first"),
        (("run", "smoke", "--data", "people", "--folder"), STOPPED, 130, "Resume with: kith-train resume x"),
    ],
)
def test_no_process_is_left_after_the_last_line(
    words: tuple[str, ...], before: str, code: int, said: str, tmp_path: Path
) -> None:
    """A thread that never ends, as one of a library might, does not keep the process alive."""
    write_people(tmp_path / "people", side=112)
    program = (
        f"import sys, threading, time; sys.argv = {['kith-train', *words]!r}\nfrom training.cli import main{before}"
    )
    program += "\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}main()"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    printed = " ".join((done.stdout + done.stderr).split())
    assert (done.returncode, said in printed, "Traceback" in printed) == (code, True, False), printed
