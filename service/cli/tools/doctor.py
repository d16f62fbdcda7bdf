"""Checks of the installation, the database, the model packs, and the engine that runs each network."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from typing import Final, Literal

import numpy as np

from models.engines.selection import EnginePreference, open_network, open_networks
from models.errors import ModelError, RuntimeUnavailableError
from models.runtime.cuda_network import visible_gpus
from models.runtime.onnx_runtime import available_cores, available_providers, runtime_version
from models.runtime.openvino_network import fast_precisions, openvino_version
from models.vision.specs import DetectionSpec, NetworkSpec
from service.core.errors import KithError, SettingsError
from service.inference.recognizers import read_packs
from service.resources import check_rights, database_exists, master_keys, open_own_database
from service.security.master_keys import KeyFile
from service.settings import Settings
from service.storage.damage import damage
from service.storage.db.file_system import OWNER_REMEDY

Verdict = Literal["ok", "warning", "error"]
SHARED_PACKAGES: Final = ("onnxruntime", "faiss", "cv2")
"""Import packages that several distributions install, so that the later one overwrites files of the earlier one."""


@dataclass(frozen=True)
class InstallationCheck:
    """Result of one check. ``what`` names the subject, such as a package or a network file."""

    what: str
    verdict: Verdict
    detail: str


def diagnose(settings: Settings) -> list[InstallationCheck]:
    """Check the installation and the database, then run the packs' networks under the profiler."""
    checks = [
        InstallationCheck("python", "ok", f"{platform.python_version()} on {platform.machine()}"),
        InstallationCheck("cores", "ok", f"{available_cores()} usable"),
        *check_conflicts(packages_distributions()),
        check_master_key(settings),
        check_data(settings),
    ]
    if all(check.verdict != "error" for check in checks[-2:]):
        checks += check_database(settings)
    try:
        detail = f"{runtime_version()}, offers {', '.join(available_providers())}"
        checks.append(InstallationCheck("onnxruntime", "ok", detail))
    except RuntimeUnavailableError as error:
        if not find_spec("openvino"):
            return [*checks, InstallationCheck("onnxruntime", "error", str(error))]
        effect = "OpenVINO serves without it, but `kith models pull` and GPUs need it"
        checks.append(InstallationCheck("onnxruntime", "warning", f"{error}: {effect}"))
    if find_spec("openvino"):
        detail = f"{openvino_version()}, precisions {', '.join(sorted(fast_precisions()))}"
        checks.append(InstallationCheck("openvino", "ok", detail))
    try:
        packs = read_packs(settings.pack_paths, settings.models_path)
        for pack in packs:
            checks.append(InstallationCheck("pack", "ok", f"{pack.model_id}: checksums match"))
            checks += [InstallationCheck(name, "ok", f"ignored: {reason}") for name, reason in pack.ignored.items()]
        specs = [*packs[0].specs.values(), *(pack.recognition for pack in packs[1:])]
        checks += check_gpus(settings, specs)
        for spec in specs:
            checks += [] if settings.wish.wants_gpu else _check_network(spec, settings.wish)
    except (ModelError, SettingsError) as error:
        checks.append(InstallationCheck("pack", "error", str(error)))
    return checks


def check_master_key(settings: Settings) -> InstallationCheck:
    """Check the sources of the master key. Warn if it is stored with the data, since a thief would get both."""
    try:
        sources = master_keys(settings).sources
        found = "; ".join(f"{', '.join(each.ids()) or 'created at first start'} from {each.place}" for each in sources)
    except KithError as error:
        return InstallationCheck("master key", "error", f"{error}. {error.remedy}")
    data_dir = settings.data_dir.resolve()
    if any(each.may_make and each.ids() and not each.is_backed_up() for each in sources if isinstance(each, KeyFile)):
        found += "; never backed up, so run 'kith master backup FILE'"
    if any(isinstance(each, KeyFile) and data_dir in each.path.resolve().parents for each in sources):
        advice = "it is stored with the data that it protects. Set KITH_MASTER_KEY_FILE to another place"
        return InstallationCheck("master key", "warning", f"{found}; {advice} (docs/privacy.md)")
    return InstallationCheck("master key", "ok", found)


def check_data(settings: Settings) -> InstallationCheck:
    """Check the rights to the data directory and the database file. Neither is created, opened or migrated."""
    try:
        check_rights(settings)
    except (KithError, OSError) as error:
        return InstallationCheck("data", "error", f"{error}. {getattr(error, 'remedy', OWNER_REMEDY)}")
    return InstallationCheck("data", "ok", f"{settings.data_dir.absolute()} can be written")


def check_database(settings: Settings) -> list[InstallationCheck]:
    """Look for damage in the database, if there is one: every sealed value is opened. Servers may run meanwhile."""
    if not database_exists(settings):
        return []
    try:
        with closing(open_own_database(settings)) as database:
            found = [*damage(database)]
    except KithError as error:
        found = [f"{error}. {error.remedy}"]
    damaged = [InstallationCheck("database", "error", each) for each in found]
    return damaged or [InstallationCheck("database", "ok", "sound, and every encrypted value opens")]


def check_conflicts(owners: Mapping[str, list[str]]) -> list[InstallationCheck]:
    """Report distributions that overwrite each other's files. ``owners``: distributions by import package."""
    checks = []
    for package in SHARED_PACKAGES:
        present = sorted(set(owners.get(package, ())))
        if len(present) > 1:
            verdict: Verdict = "error" if package == "onnxruntime" else "warning"
            remedy = "uninstall all and install one; install insightface with --no-deps (docs/decisions.md, 2)"
            detail = f"{' and '.join(present)} overwrite each other: {remedy}"
            checks.append(InstallationCheck(package, verdict, detail))
    return checks


def check_gpus(settings: Settings, specs: Sequence[NetworkSpec]) -> list[InstallationCheck]:
    """Check that requested GPUs run the networks. An error here would keep the service from becoming ready."""
    gpus = visible_gpus()
    if not settings.wish.wants_gpu:
        unused = f"; {', '.join(gpus)} is not used (KITH_DEVICE={settings.device})" if gpus else ""
        return [InstallationCheck("gpu", "ok", f"not requested{unused}")]
    checks = [InstallationCheck("gpu", "ok", f"{index}: {name}") for index, name in enumerate(gpus)]
    for spec in specs:
        opened = open_networks(spec, settings.wish)
        if opened.gpu_error is not None:
            return [*checks, InstallationCheck("gpu", "error", opened.gpu_error)]
        checks += [InstallationCheck(spec.path.name, "ok", network.reason) for network in opened.networks]
    return checks


def _check_network(spec: NetworkSpec, wish: EnginePreference) -> list[InstallationCheck]:
    """Run one network on the CPU and report where its nodes ran."""
    network = open_network(spec, wish)
    name = network.path.name
    sides = (256, 256) if isinstance(spec, DetectionSpec) else spec.shape
    shape = [s if isinstance(s, int) else d for s, d in zip(network.input_shape, (1, 3, *sides), strict=True)]
    placed = network.placement(np.zeros(shape, np.float32))
    detail = ", ".join(f"{count} nodes on {where}" for where, count in sorted(placed.items()))
    checks = [
        InstallationCheck(name, "ok", f"{network.engine} in {network.precision}: {network.reason}"),
        InstallationCheck(name, "ok", f"ran {detail}"),
    ]
    if network.engine == "onnxruntime" and placed.get(wanted := network.providers[0], 0) == 0:
        detail = f"{wanted} is preferred but ran no node: the network fell back"
        checks.append(InstallationCheck(name, "warning", detail))
    return checks
