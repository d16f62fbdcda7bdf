"""What is installed, and what really runs where."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from typing import Literal

import numpy as np

from models.cuda import visible_gpus
from models.engines import Spec, Wish, open_network, open_networks
from models.errors import ModelError, RuntimeUnavailableError
from models.openvino_network import fast_precisions, openvino_version
from models.openvino_network import is_installed as openvino_is_installed
from models.pack import ModelPack, load_pack
from models.runtime import available_cores, available_providers, runtime_version
from service.errors import KithError
from service.opening import master_keys
from service.security.master import KeyFile
from service.settings import Settings

Verdict = Literal["ok", "warning", "error"]
# Distributions that install the same import package: the later one overwrites the earlier one's files.
RIVALS = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml"),
    "faiss": ("faiss-cpu", "faiss-gpu", "faiss-gpu-cu12", "faiss-gpu-cu11"),
    "cv2": ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless"),
}
GPU_RUNTIME = "onnxruntime-gpu"


@dataclass(frozen=True)
class Finding:
    what: str
    verdict: Verdict
    detail: str


def diagnose(settings: Settings) -> list[Finding]:
    """Look at the installation, then run the pack's networks under the profiler."""
    installed = installed_versions()
    findings = [
        Finding("python", "ok", f"{platform.python_version()} on {platform.machine()}"),
        Finding("cores", "ok", f"{available_cores()} usable"),
        *find_rivals(installed),
        find_master_key(settings),
    ]
    try:
        providers = available_providers()
        findings.append(Finding("onnxruntime", "ok", f"{runtime_version()}, offers {', '.join(providers)}"))
        findings += find_overwritten_gpu(installed, providers)
    except RuntimeUnavailableError as error:
        if not openvino_is_installed():
            return [*findings, Finding("onnxruntime", "error", str(error))]
        missed = "OpenVINO serves without it; `kith models pull` and GPUs do not"
        findings.append(Finding("onnxruntime", "warning", f"{error}: {missed}"))
    if openvino_is_installed():
        findings.append(
            Finding("openvino", "ok", f"{openvino_version()}, computes {', '.join(sorted(fast_precisions()))}")
        )
    try:
        packs = [load_pack(path) for path in settings.pack_paths]
        for pack in packs:
            pack.verify()
            findings.append(Finding("pack", "ok", f"{pack.model_id}: checksums agree"))
        findings += find_gpus(settings, packs)
        networks: list[tuple[Spec, int]] = [(pack.recognition, pack.recognition.alignment.size_px) for pack in packs]
        if (liveness := packs[0].liveness) is not None:
            networks.append((liveness, liveness.alignment.size_px))
        for spec, side in ((packs[0].detection, 256), *networks):
            findings += [] if settings.wish.wants_gpu else _run(spec, settings.wish, side)
    except ModelError as error:
        findings.append(Finding("pack", "error", str(error)))
    return findings


def installed_versions(found: list[Distribution] | None = None) -> dict[str, str]:
    """Names and versions of all installed distributions."""
    listed = distributions() if found is None else found
    return {d.metadata["Name"].lower().replace("_", "-"): d.version for d in listed if d.metadata["Name"]}


def find_master_key(settings: Settings) -> Finding:
    """Where it comes from, and whether whoever takes the data takes the key with them."""
    try:
        sources = master_keys(settings).sources
        found = "; ".join(f"{', '.join(each.ids()) or 'made at the first start'} from {each.place}" for each in sources)
    except KithError as error:
        return Finding("master key", "error", f"{error}. {error.remedy}")
    inside = settings.data_dir.resolve()
    if any(isinstance(each, KeyFile) and inside in each.path.resolve().parents for each in sources):
        beside = (
            "it lies beside the data that it protects, and goes with them: KITH_MASTER_KEY_FILE names another place"
        )
        return Finding("master key", "warning", f"{found}; {beside} (docs/privacy.md)")
    return Finding("master key", "ok", found)


def find_rivals(installed: dict[str, str]) -> list[Finding]:
    """Two distributions that overwrite each other."""
    findings = []
    for package, names in RIVALS.items():
        present = [f"{name} {installed[name]}" for name in names if name in installed]
        if len(present) > 1:
            verdict: Verdict = "error" if package == "onnxruntime" else "warning"
            remedy = "uninstall all of them and install one; insightface goes in with --no-deps (docs/decisions/0002)"
            findings.append(Finding(package, verdict, f"{' and '.join(present)} overwrite each other: {remedy}"))
    return findings


def find_overwritten_gpu(installed: dict[str, str], providers: list[str]) -> list[Finding]:
    """onnxruntime-gpu is installed, yet the library that loads has no CUDA: another one lies over it."""
    if GPU_RUNTIME in installed and "CUDAExecutionProvider" not in providers:
        detail = "onnxruntime-gpu is installed, but what loads has no CUDA: another onnxruntime was installed over it"
        return [Finding("gpu", "error", f"{detail}; uninstall every onnxruntime and install onnxruntime-gpu again")]
    return []


def find_gpus(settings: Settings, packs: Sequence[ModelPack]) -> list[Finding]:
    """What the GPUs run, where they are wanted, as in the service: an error is what keeps it from being ready."""
    gpus = visible_gpus()
    if not settings.wish.wants_gpu:
        idle = f"; {', '.join(gpus)} stays idle (KITH_DEVICE={settings.device})" if gpus else ""
        return [Finding("gpu", "ok", f"none is wanted{idle}")]
    findings = [Finding("gpu", "ok", f"{index}: {name}") for index, name in enumerate(gpus)]
    specs: list[Spec] = [packs[0].detection, *(pack.recognition for pack in packs)]
    for spec in specs:
        opened = open_networks(spec, settings.wish)
        if opened.shortfall is not None:
            return [*findings, Finding("gpu", "warning" if settings.allow_cpu else "error", opened.shortfall)]
        findings += [Finding(spec.path.name, "ok", network.why) for network in opened.networks]
    return findings


def _run(spec: Spec, wish: Wish, side_px: int) -> list[Finding]:
    """On the CPU."""
    network = open_network(spec, wish)
    name = network.path.name
    shape = [s if isinstance(s, int) else d for s, d in zip(network.input_shape, (1, 3, side_px, side_px), strict=True)]
    placed = network.placement(np.zeros(shape, np.float32))
    detail = ", ".join(f"{count} nodes on {where}" for where, count in sorted(placed.items()))
    findings = [
        Finding(name, "ok", f"{network.engine} in {network.precision}: {network.why}"),
        Finding(name, "ok", f"ran {detail}"),
    ]
    if network.engine == "onnxruntime" and placed.get(wanted := network.providers[0], 0) == 0:
        findings.append(Finding(name, "warning", f"{wanted} is first in line but ran no node: it fell back"))
    return findings
