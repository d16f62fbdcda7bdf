"""Several packs are served at once, and each gallery uses its own recognizer."""

from __future__ import annotations

from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith, KithClientError
from models.pack.loading import BUNDLED_PACK
from models.pack.manifest import ModelPack
from service.core.errors import SettingsError
from service.server import embedded
from service.settings import load_settings
from tests.conftest import jpeg
from tests.packs import PROJECTED, projected_pack

Photo = NDArray[np.uint8]


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> ModelPack:
    return projected_pack(tmp_path_factory.mktemp("packs"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, second: ModelPack, astronaut: Photo) -> Path:
    """A database with a gallery of the second pack, ``theirs``."""
    data = tmp_path_factory.mktemp("data")
    settings = load_settings(data_dir=data, pack=second.directory, log_level="WARNING")
    with embedded(settings) as url, Kith(url) as kith:
        kith.create_gallery("theirs")
        kith.enroll("theirs", "eileen", jpeg(astronaut))
    return data


def code(call: object, *arguments: object, **options: object) -> str:
    assert callable(call)
    with pytest.raises(KithClientError) as raised:
        call(*arguments, **options)
    return raised.value.code


def test_galleries_are_served_by_their_own_recognizer(
    folder: Path, second: ModelPack, astronaut: Photo, actor: Photo
) -> None:
    darker = jpeg((astronaut[:, ::-1] * 0.75).astype(np.uint8), 60)
    settings = load_settings(data_dir=folder, extra_packs=f" {second.directory} ,", log_level="WARNING")
    with embedded(settings) as url, Kith(url) as kith:
        kith.create_gallery("ours")
        kith.enroll("ours", "eileen", jpeg(astronaut))
        for gallery, pack in (("ours", "kith-compact"), ("theirs", "projected")):
            answer = kith.identify(gallery, darker)
            assert (answer.model, answer.recognizer) == (pack, kith.gallery(gallery).recognizer)
            assert (answer.results[0].outcome, answer.results[0].subject) == ("identified", "eileen")
            assert kith.identify(gallery, jpeg(actor)).results[0].outcome == "unknown"
            assert kith.risk(gallery).evidence.source == "pack"

        served = kith.model()
        assert [m.model for m in served.models] == ["kith-compact", "projected"] and served.model == "kith-compact"
        ours, theirs = (model.recognizer for model in served.models)
        assert (theirs, served.models[1].dimension) == (second.recognition.fingerprint(), PROJECTED)
        for name in ("projected", theirs):
            embedded_by = kith.embed(jpeg(astronaut), model=name)
            assert (embedded_by.model, embedded_by.recognizer) == ("projected", theirs)
            assert len(embedded_by.images[0].faces[0].embedding or ()) == PROJECTED
        assert code(kith.embed, jpeg(astronaut), model="none-such") == "model_not_served"

        # A verification is by one recognizer: that of a subject's gallery.
        assert kith.verify(jpeg(astronaut), jpeg(astronaut)).model == "kith-compact"
        asked = kith.verify(jpeg(astronaut), jpeg(actor), model="projected")
        assert (asked.model, asked.outcome) == ("projected", "different")
        implied = kith.verify(jpeg(astronaut), ("theirs", "eileen"))
        assert (implied.model, implied.outcome) == ("projected", "same")
        assert code(kith.verify, jpeg(astronaut), ("ours", "eileen"), model="projected") == "recognizer_mismatch"

        # Vectors of the wrong recognizer are refused. The dimension identifies it if the request names none.
        vector = kith.embed(jpeg(astronaut)).images[0].faces[0].embedding
        assert vector is not None
        assert kith.identify("ours", embeddings=[vector], recognizer=ours).results
        for call, arguments in ((kith.identify, ()), (kith.enroll, ("x",))):
            assert code(call, "ours", *arguments, embeddings=[vector], recognizer=theirs) == "recognizer_mismatch"
            assert code(call, "theirs", *arguments, embeddings=[vector]) == "embedding_invalid"
        for whose, key, value in ((theirs, "code", "recognizer_mismatch"), (ours, "outcome", "same")):
            sides = {"a": {"embedding": vector, "recognizer": whose}, "b": {"embedding": vector}}
            assert httpx.post(f"{url}/v1/verify", json=sides).json()[key] == value


def test_a_gallery_whose_recognizer_is_not_served_is_refused(folder: Path, astronaut: Photo) -> None:
    with embedded(load_settings(data_dir=folder, log_level="WARNING")) as url, Kith(url) as kith:
        assert code(kith.identify, "theirs", jpeg(astronaut)) == "recognizer_mismatch"
        assert code(kith.enroll, "theirs", "x", jpeg(astronaut)) == "recognizer_mismatch"
        assert code(kith.risk, "theirs") == "recognizer_mismatch"
        assert code(kith.verify, jpeg(astronaut), ("theirs", "eileen")) == "recognizer_mismatch"


def test_a_pack_is_served_once(tmp_path: Path) -> None:
    with (
        pytest.raises(SettingsError, match="repeats pack kith-compact"),
        embedded(load_settings(data_dir=tmp_path, extra_packs=str(BUNDLED_PACK), log_level="ERROR")),
    ):
        pass
