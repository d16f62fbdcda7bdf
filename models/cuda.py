"""What the machine offers by way of NVIDIA GPUs, and why CUDA could not start: asked of the driver and the loader, for
onnxruntime itself goes on without a word."""

from __future__ import annotations

import ctypes
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from models.runtime import available_providers, library

CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
_NAME_BYTES = 256


def visible_gpus() -> list[str]:
    """Names of the GPUs this process may use, by index; CUDA_VISIBLE_DEVICES counts. Empty without a driver."""
    try:
        driver = _driver()
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    names = []
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, _NAME_BYTES, device)
        names.append(name.value.decode())
    return names


def why_not_cuda() -> str | None:
    """The first thing that keeps CUDA from starting here, and what to do; None where nothing is seen to.

    Raises:
        RuntimeUnavailableError: there is no onnxruntime.
    """
    if CUDA not in available_providers():
        return (
            "the onnxruntime that loads has no CUDA: uninstall every onnxruntime, then install this distribution with "
            "its 'gpu' extra in place of 'cpu'"
        )
    try:
        status = _driver().cuInit(0)
    except OSError as error:
        return f"no NVIDIA driver is here ({error}): install it, or give the container its GPUs (--gpus all)"
    if status:
        return f"the NVIDIA driver finds no GPU it can use (cuInit says {status}): see nvidia-smi"
    if not visible_gpus():
        return "the NVIDIA driver shows no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    load_libraries()
    try:
        ctypes.CDLL(str(Path(library().__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return f"a library of CUDA is missing ({error}): install 'onnxruntime-gpu[cuda,cudnn]' of the same version"
    return None


def load_libraries() -> None:
    """Load CUDA's and cuDNN's libraries from NVIDIA's Python packages, where they are installed."""
    if hasattr(library(), "preload_dlls"):
        with redirect_stdout(StringIO()):  # it prints what it does not find; why_not_cuda says that, and what to do
            library().preload_dlls()


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
