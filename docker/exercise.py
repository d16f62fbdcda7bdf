"""One enrolment, or one identification of the enrolled person and of strangers, against a running container."""

from __future__ import annotations

import sys

from PIL import Image

from service.client import Kith
from service.demo import altered, encoded, package_file

GALLERY = "check"


def main() -> None:
    url, key, step = sys.argv[1:]
    person = Image.open(package_file("skimage", "data", "astronaut.png")).convert("RGB")
    strangers = Image.open(package_file("insightface", "data", "images", "t1.jpg")).convert("RGB")
    with Kith(url, key) as kith:
        if step == "enrol":
            kith.create_gallery(GALLERY)
            kith.enrol(GALLERY, "collins", encoded(person))
        probe = altered(person, mirror=True, turn_deg=5, scale=0.8, light=0.8, jpeg=60)
        (found,) = kith.identify(GALLERY, probe).results
        others = kith.identify(GALLERY, encoded(strangers)).results
    print(f"{found.outcome} {found.subject} {found.similarity}; strangers: {[r.outcome for r in others]}")
    if found.subject != "collins" or not others or any(r.subject for r in others):
        raise SystemExit("a decision is wrong")


if __name__ == "__main__":
    main()
