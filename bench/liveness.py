"""Trial of liveness training on simulated screens and prints. Run with ``python -m bench.liveness``.

Photos, run and pack stay in ``runs/liveness``, and a second call repeats only what is missing.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from bench.common import RESULTS, ROOT, outside, write
from bench.simulated_attacks import write_simulation
from models.pack.loading import BUNDLED_PACK, load_pack, with_pulled_liveness
from training.cli.commands import app
from training.data.identities import read_rgb
from training.evaluation.liveness import evaluate_liveness

FOLDER: Final = ROOT / "runs" / "liveness"
PHOTOS: Final = 240
TEST_EVERY: Final = 3
ARGUMENTS: Final = ("--steps", "500", "--threads", "1")
TITLE: Final = """# Liveness networks on simulated attacks

**These attacks are simulated** (`bench/simulated_attacks.py`). The figures show that the recipe learns, and say nothing
about real attacks. `kith-train liveness --steps 500` got 160 CelebA photos with their background, each live, on a
screen and as a print. Every fifth chose the threshold for an APCER of 5 %. The test has 80 other photos, with the same
two instruments. Rates have 95 % intervals, with each photo as a person. Regenerate with `python -m bench.liveness`.
"""
HEAD: Final = "| Rate | Simulated test |\n|---|---|\n"


def simulate(photos: Path) -> tuple[Path, Path]:
    """Write the folders for training and for tests, unless they exist."""
    files = sorted(photos.iterdir())[:PHOTOS]
    folders = FOLDER / "train", FOLDER / "test"
    for test, folder in enumerate(folders):
        chosen = [file for i, file in enumerate(files) if (i % TEST_EVERY == 0) == bool(test)]
        missing = [file for file in chosen if not (folder / "attack" / "print" / f"{file.stem}.jpg").exists()]
        for file in missing:
            write_simulation([(file.stem, read_rgb(file))], folder)
    return folders


def trained_pack(train: Path) -> Path:
    """Return a copy of the bundled pack with a network trained on the photos."""
    pack = FOLDER / "pack"
    if not pack.exists():
        shutil.copytree(BUNDLED_PACK, pack)
    if load_pack(pack).liveness is None:
        folders = ["--live", str(train / "live"), "--attack", str(train / "attack"), "--output", str(FOLDER / "run")]
        app(["liveness", str(pack), *folders, *ARGUMENTS], standalone_mode=False)
    return pack


def main() -> None:
    """Write the table."""
    train, test = simulate(outside("KITH_DATA", "data") / "scenes" / "images")
    packs = {"trained": load_pack(trained_pack(train))}
    published = with_pulled_liveness(load_pack(BUNDLED_PACK), ROOT / "data" / "models")
    if published.liveness is not None:
        packs["minifasnet"] = published
    measured = {name: evaluate_liveness(pack, test / "live", test / "attack") for name, pack in packs.items()}
    tables = [
        f"\n## {name}\n\n{HEAD}" + "".join(f"| {row} | {value} |\n" for row, value in rows)
        for name, (_, rows) in measured.items()
    ]
    write(RESULTS / "liveness.md", TITLE + "".join(tables), {name: figures for name, (figures, _) in measured.items()})


if __name__ == "__main__":
    main()
