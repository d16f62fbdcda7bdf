"""No photo takes long or much memory for what it is, and none ends in anything but pixels or a documented error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.inference.images import ImageLimits
from tests.conftest import ROOT
from tests.service.inference.image_files import decode, harmful, scans

pytestmark = pytest.mark.long

MAX_CPU_S = 13.0
"""CPU time of a file below a megabyte: a process that decodes one has 10 s, and starting the next takes a second."""
MAX_MEMORY_BYTES = 1_100_000_000
"""A photo of 50 megapixels has 150 MB, and its decoders several times that."""
UNREAD = ("pdf and jpeg", "gif and script")
REFUSED = {
    "jpeg, 20,000 scans": "image_too_large",
    "jpeg, scans behind a marker of no meaning": "image_too_large",
    "jpeg, 200,000 markers": "image_too_large",
    "tiff, 20,000 scans": "image_damaged",
    "png, 900 profiles": "image_damaged",
    "gif, 4 gigapixels": "image_too_large",
    "heic, 4 megapixels said to be few": "image_damaged",
    "heic, few pixels said to be 49 million": "image_damaged",
    "heic, 4 exapixels": "image_damaged",
    "heic, a grid of a gigapixel": "image_too_large",
    "heic, a grid of 65,280 tiles": "image_format",
    "bmp, 4 exapixels": "image_too_large",
    **dict.fromkeys(UNREAD, "image_format"),
}
PROGRAM = r"""
import json, re, resource, sys, time
from pathlib import Path
from service.core.errors import ImageError
from service.inference.images import ImageLimits, PhotoDecoder
photos = PhotoDecoder(ImageLimits(20_000_000, 50_000_000))
resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
def child():
    return [each._process.pid for each in photos._processes._idle]
def cpu_s():
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = sum(time.clock_gettime(~pid << 3 | 2) for pid in child())
    return time.process_time() + ended.ru_utime + ended.ru_stime + running
for path in sorted(Path(sys.argv[1]).iterdir()):
    start, payload = cpu_s(), path.read_bytes()
    try:
        end = str(photos.decode(payload).shape)
    except ImageError as error:
        end = error.code
    spent_s = cpu_s() - start
    # Not ru_maxrss, which a process has from the one that started it.
    kilobytes = sum(
        int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) for pid in ("self", *child())
    )
    print(json.dumps([path.name, end, spent_s, kilobytes * 1024, len(payload)]), flush=True)
"""


def test_no_photo_takes_long_or_much(tmp_path: Path) -> None:
    """In a process of their own: one that ends it is seen, and so is the most memory it had."""
    photos = harmful()
    for name, payload in photos.items():
        (tmp_path / name).write_bytes(payload)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    results = {line[0]: line[1:] for line in map(json.loads, done.stdout.splitlines())}
    assert results.keys() == photos.keys(), done.stderr
    slow = {name: (end, cpu_s) for name, (end, cpu_s, _, size) in results.items() if cpu_s > MAX_CPU_S and size < 1e6}
    assert not slow
    assert max(most for _, _, most, _ in results.values()) < MAX_MEMORY_BYTES
    assert {name: results[name][0] for name in REFUSED} == REFUSED


def test_many_scans_of_few_pixels_and_few_of_many_are_photos() -> None:
    assert decode(scans(320, 240, 500), ImageLimits(1_000_000, 5_000_000)).shape == (240, 320, 3)
    assert decode(scans(2000, 2000, 12), ImageLimits(1_000_000, 5_000_000)).shape == (2000, 2000, 3)
