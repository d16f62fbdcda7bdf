"""Photos for the tutorial, from installed Python packages.

Run ``python -m service.cli.tools.tutorial_photos FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from service.cli.tools.demo import alter, encode_jpeg, sample_photos

FRIEND_BOXES_PX: Final = {"robin": (15, 210, 225, 450), "sam": (225, 90, 420, 330)}
"""Crops of the group photo: left, top, right, bottom."""


def write_photos(folder: Path) -> list[Path]:
    """Write the tutorial's photos and return their paths relative to ``folder``.

    There is a folder per person, ``visitor.jpg`` (one of these people, altered) and ``party.jpg`` (two of these people
    and four strangers).

    Raises:
        PhotosMissingError: a package with photos is not installed.
    """
    astronaut, actor, group = sample_photos()
    people = {"eileen": astronaut, "tom": actor, **{name: group.crop(box) for name, box in FRIEND_BOXES_PX.items()}}
    photos = {Path("people", name, "1.jpg"): encode_jpeg(photo) for name, photo in people.items()}
    photos[Path("visitor.jpg")] = alter(astronaut, mirror=True, turn_deg=6, scale=0.7, light=0.75, jpeg=60)
    photos[Path("party.jpg")] = alter(group, mirror=False, turn_deg=0, scale=0.8, light=0.85, jpeg=70)
    for path, content in photos.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return list(photos)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for written in write_photos(target):
        print(target / written)
