"""Photos for the tutorial, out of Python packages that bring some: ``python -m service.tutorial_photos FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from PIL import Image

from service.demo import altered, encoded, package_file

FRIENDS: Final = {"robin": (15, 210, 225, 450), "sam": (225, 90, 420, 330)}
"""Of the group photo's six: cut out as one would crop a contact picture, left, top, right, bottom in pixels."""


def write_photos(folder: Path) -> list[Path]:
    """A folder per person, ``visitor.jpg`` (one of them, as another phone and a bad lamp would show her) and
    ``party.jpg`` (two of them, and four strangers). Raises PhotosMissingError."""
    astronaut = Image.open(package_file("skimage", "data", "astronaut.png")).convert("RGB")
    actor = Image.open(package_file("insightface", "data", "images", "Tom_Hanks_54745.png")).convert("RGB")
    group = Image.open(package_file("insightface", "data", "images", "t1.jpg")).convert("RGB")
    people = {"eileen": astronaut, "tom": actor, **{name: group.crop(box) for name, box in FRIENDS.items()}}
    photos = {Path("people", name, "1.jpg"): encoded(photo) for name, photo in people.items()}
    photos[Path("visitor.jpg")] = altered(astronaut, mirror=True, turn_deg=6, scale=0.7, light=0.75, jpeg=60)
    photos[Path("party.jpg")] = altered(group, mirror=False, turn_deg=0, scale=0.8, light=0.85, jpeg=70)
    for path, content in photos.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return list(photos)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for written in write_photos(target):
        print(target / written)
