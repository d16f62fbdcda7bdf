"""The largest of several faces is chosen alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from service.client import Kith
from tests.conftest import jpeg


def test_only_the_largest_face_is_identified(kith: Kith, gallery: str, group: NDArray[np.uint8]) -> None:
    everyone = kith.detect(jpeg(group)).images[0].faces
    largest = max(everyone, key=lambda f: (f.box[2] - f.box[0]) * (f.box[3] - f.box[1]))
    (result,) = kith.identify(gallery, jpeg(group), faces="largest", check_quality=False).results
    assert result.face is not None
    assert result.face.box == largest.box
