"""Detection of NVIDIA GPUs and diagnosis of CUDA, since onnxruntime falls back to the CPU silently."""

from __future__ import annotations

import ctypes
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from models.runtime.onnx_runtime import available_providers, import_onnxruntime

CUDA = "CUDAExecutionProvider"
MAX_NAME_BYTES = 256


def visible_gpus() -> list[str]:
    """Return the names of usable GPUs by index, respecting CUDA_VISIBLE_DEVICES; empty without a driver."""
    try:
        driver = _driver()
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    names = []
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(MAX_NAME_BYTES)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, MAX_NAME_BYTES, device)
        names.append(name.value.decode())
    return names


def diagnose_cuda() -> str | None:
    """Return the first problem that prevents CUDA from starting and its remedy; None if no problem is found.

    Raises:
        RuntimeUnavailableError: onnxruntime is not installed.
    """
    if CUDA not in available_providers():
        return (
            "the installed onnxruntime has no CUDA: uninstall every onnxruntime, then install this distribution with "
            "its 'gpu' extra instead of 'cpu'"
        )
    try:
        status = _driver().cuInit(0)
    except OSError as error:
        return f"no NVIDIA driver is installed ({error}): install it, or give the container its GPUs (--gpus all)"
    if status:
        return f"the NVIDIA driver finds no usable GPU (cuInit returned {status}): see nvidia-smi"
    if not visible_gpus():
        return "the NVIDIA driver shows no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    preload_cuda_libraries()
    try:
        ctypes.CDLL(str(Path(import_onnxruntime().__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return f"a CUDA library is missing ({error}): install 'onnxruntime-gpu[cuda,cudnn]' of the same version"
    return None


def preload_cuda_libraries() -> None:
    """Load the CUDA and cuDNN libraries of NVIDIA's Python packages, if installed."""
    if hasattr(import_onnxruntime(), "preload_dlls"):
        with redirect_stdout(StringIO()):  # preload_dlls prints missing libraries; diagnose_cuda reports them
            import_onnxruntime().preload_dlls()


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
