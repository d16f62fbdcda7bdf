"""Fuzzing with libFuzzer, on Linux only.

``python -m tests.fuzz TARGET ... CORPUS`` runs one target, or ``all`` in turn, with libFuzzer options. ``python -m
tests.fuzz --minutes 10`` runs each target from the stored corpus (the folder fuzz-corpus).

Exits with 1 at the first finding. Its bytes are in fuzz-findings; add them to the target's seeds (docs/faults.md).
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import atheris

READERS = [
    "models.fields",
    "models.pack.loading",
    "models.pack.manifest",
    "models.risk.calibration",
    "service.api.http.bodies",
    "service.inference.archives",
    "service.storage.transfer.ndjson",
    "service.domain.gallery_items",
    "service.inference.decoding",
    "service.inference.images",
]
with atheris.instrument_imports(include=READERS):
    from tests.fuzz.targets import TARGETS, Target

CORPUS = Path("fuzz-corpus")
FINDINGS = Path("fuzz-findings")
LONGEST = 20_000
"""Maximum input size in bytes: thousands of small inputs run per second."""


def fuzz(name: str, options: list[str]) -> None:
    """Run until an option stops it, then exit the process. The last option is the folder of the corpus."""
    target: Target = TARGETS[name]
    folder = Path(options[-1])
    folder.mkdir(parents=True, exist_ok=True)
    for seed in target.seeds():
        (folder / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    atheris.Setup([sys.argv[0], *options], target.run)
    atheris.Fuzz()


def campaign(minutes: float) -> int:
    FINDINGS.mkdir(exist_ok=True)
    seconds = max(1, int(60 * minutes / (len(TARGETS) - 1)))
    for name in [name for name in TARGETS if name != "all"]:
        options = [f"-max_total_time={seconds}", f"-max_len={LONGEST}", "-timeout=10", "-rss_limit_mb=3000"]
        options += ["-print_final_stats=1", f"-artifact_prefix={FINDINGS}/{name}-", str(CORPUS / name)]
        ended = subprocess.run([sys.executable, "-m", "tests.fuzz", name, *options])
        if ended.returncode:
            return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--minutes":
        sys.exit(campaign(float(sys.argv[2])))
    fuzz(sys.argv[1], sys.argv[2:])
