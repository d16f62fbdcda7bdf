"""If the requested GPU does not run the networks, the service responds and reports that it is not ready."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from kith import Kith
from models.engines.selection import (
    EnginePreference,
    input_shapes,
    make_probe,
    open_networks,
)
from models.errors import RuntimeUnavailableError
from models.pack.manifest import ModelPack
from models.runtime.cuda_network import CUDA, visible_gpus
from models.runtime.onnx_runtime import available_providers
from service.api.routes.system import get_readiness
from service.app import create_app
from service.cli.tools.doctor import diagnose
from service.core.errors import SettingsError
from service.inference.batcher import FAILED_BATCHES, DevicePool
from service.operations.status import readiness
from service.server import embedded
from service.settings import load_settings
from service.usecases.backend import Backend
from tests.conftest import jpeg
from tests.refusals import raises_code

without_gpu = pytest.mark.skipif(CUDA in available_providers() and bool(visible_gpus()), reason="a GPU is here")


@without_gpu
def test_not_ready_without_the_gpu_that_is_wanted(tmp_path: Path, astronaut: NDArray[np.uint8]) -> None:
    settings = load_settings(data_dir=tmp_path, log_level="ERROR", device="gpu")
    with embedded(settings) as url:
        ready = httpx.get(f"{url}/readyz")
        with Kith(url) as kith:
            assert len(kith.detect(jpeg(astronaut)).images[0].faces) == 1
    assert (ready.status_code, ready.json()["code"]) == (503, "gpu_unavailable")
    assert "install" in ready.json()["detail"]
    assert "KITH_DEVICE=cpu" in ready.json()["remedy"]
    for wanted, verdict in ((settings, "error"), (load_settings(data_dir=tmp_path), "ok")):
        assert [found.verdict for found in diagnose(wanted) if found.what == "gpu"] == [verdict]


def test_not_ready_after_a_gpu_is_lost_until_it_answers_again(tmp_path: Path) -> None:
    async def main() -> None:
        app = create_app(load_settings(data_dir=tmp_path, log_level="ERROR", device="cpu"))
        async with app.router.lifespan_context(app):
            kith: Backend = app.state.backend
            await get_readiness(kith)
            with DevicePool(2) as gpus:
                audit, store = kith.audit, kith.store
                checks = readiness([], gpus, gpus, store, None, audit)
                lost = replace(kith, readiness=checks)
                for _ in range(FAILED_BATCHES):
                    await get_readiness(lost)
                    gpus.record(0, True)
                    gpus.record(1, False)
                with raises_code("gpu_unavailable", match="nvidia-smi"):
                    await get_readiness(lost)
                gpus.record(1, True)
                await get_readiness(lost)

    asyncio.run(main())


def test_what_only_a_cpu_has_is_not_asked_of_a_gpu(pack: ModelPack) -> None:
    assert not EnginePreference(engine="openvino").wants_gpu
    assert EnginePreference(engine="openvino", device="gpu").wants_gpu
    for wish in (
        EnginePreference(engine="openvino", device="gpu"),
        EnginePreference(precision="int8", device="gpu"),
    ):
        with pytest.raises(RuntimeUnavailableError, match="KITH_DEVICE"):
            open_networks(pack.recognition, wish)


def test_every_shape_that_a_service_meets_is_prepared(pack: ModelPack) -> None:
    assert (1, 3, 112, 112) in input_shapes(pack.recognition)
    assert (32, 3, 112, 112) in input_shapes(pack.recognition)
    assert {(1, 3, 256, 256), (8, 3, 640, 256)} <= set(input_shapes(pack.detection))
    probe = make_probe(pack.detection, input_shapes(pack.detection))
    assert probe.shape == (1, 3, 256, 256)
    assert -1.0 <= probe.min() < -0.9 < 0.9 < probe.max() <= 1.0


def test_one_setting_pins_engine_precision_and_provider() -> None:
    for runtime, pinned in (
        ("openvino", ("openvino", None, None)),
        ("fp32, onnxruntime", ("onnxruntime", "fp32", None)),
        ("CoreMLExecutionProvider,fp32", (None, "fp32", "CoreMLExecutionProvider")),
    ):
        wish = load_settings(runtime=runtime).wish
        assert (wish.engine, wish.precision, wish.provider) == pinned
    for runtime, said in (
        ("onnxruntime,int4", "KITH_RUNTIME: 'int4' is no engine, precision or execution provider"),
        ("fp32,int8", "KITH_RUNTIME: fp32 and int8 exclude each other: name one precision"),
    ):
        with pytest.raises(SettingsError, match=said):
            load_settings(runtime=runtime)
