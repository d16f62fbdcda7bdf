"""Profile the two networks with the runtimes' own profilers: time by operator, the slowest first.

Covers both installed runtimes, in the numeric format that Kith chooses and in fp32. Prints, and writes
bench/results/operators.md.

    python -m bench.operators
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from bench.common import RESULTS
from bench.machine import commit, machine
from models.engines.selection import EnginePreference, open_network
from models.pack.loading import BUNDLED_PACK, load_pack
from models.runtime.network import Float
from models.runtime.onnx_runtime import OnnxNetwork, profile_nodes
from models.runtime.openvino_network import OpenVinoNetwork, is_installed
from models.vision.specs import DetectionSpec, RecognitionSpec

TABLE: Final = RESULTS / "operators.md"
SIDES_PX: Final = {"detector": 256, "recognizer": 112}
RUNS: Final = 9
TOLD: Final = 4


def main() -> None:
    pack = load_pack(BUNDLED_PACK)
    lines = [
        "# Operators",
        "",
        f"`python -m bench.operators` at commit {commit()} on {machine()}: one photo of 256x256,",
    ]
    lines += [f"one crop, milliseconds by each runtime's own profiler, medians of {RUNS} runs, and shares.", ""]
    lines += ["| Network | runs by | ms | dearest operators |", "|---|---|---|---|"]
    for name, spec in (("detector", pack.detection), ("recognizer", pack.recognition)):
        batch = np.random.default_rng(0).uniform(-1, 1, (1, 3, SIDES_PX[name], SIDES_PX[name])).astype(np.float32)
        lines += [row(name, network, batch) for network in networks(spec)]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(TABLE.read_text(encoding="utf-8"))


def networks(spec: DetectionSpec | RecognitionSpec) -> Iterator[OpenVinoNetwork | OnnxNetwork]:
    yield OnnxNetwork(spec.path, "CPUExecutionProvider")
    if is_installed():
        chosen = open_network(spec, EnginePreference(engine="openvino"))
        yield OpenVinoNetwork(spec.path)
        if isinstance(chosen, OpenVinoNetwork) and chosen.precision != "fp32":
            yield chosen


def row(name: str, network: OpenVinoNetwork | OnnxNetwork, batch: Float) -> str:
    runs = [operators_ms(network, batch) for _ in range(RUNS)]
    taken = {operator: statistics.median(run.get(operator, 0.0) for run in runs) for operator in runs[0]}
    return f"| {name} | {network.engine} {network.precision} | {sum(taken.values()):.2f} | {dearest(taken)} |"


def operators_ms(network: OpenVinoNetwork | OnnxNetwork, batch: Float) -> dict[str, float]:
    """Return the milliseconds of one run by operator, from the runtime's profiler."""
    total_ms: defaultdict[str, float] = defaultdict(float)
    if isinstance(network, OnnxNetwork):
        options = network.session_options()
        for node in profile_nodes(options, lambda: network.open_session(network.providers, options), batch, warm=True):
            total_ms[node.operator] += node.ms
    else:
        for info in network.profile(batch):
            total_ms[info.node_type] += info.real_time.total_seconds() * 1000
    return dict(total_ms)


def dearest(taken: Mapping[str, float]) -> str:
    total = sum(taken.values())
    ordered = sorted(taken, key=lambda operator: -taken[operator])[:TOLD]
    return ", ".join(f"{operator} {100 * taken[operator] / total:.0f} %" for operator in ordered)


if __name__ == "__main__":
    main()
