# SPDX-License-Identifier: Apache-2.0
"""What a parameter's gradient sum costs on the wire between replicas, and how fast it is packed.

    python benchmarks/reduce_packing.py [--dims 64,192] [--steps 1,3,10,20] [--replicas 2]

Trains the demo's model (other widths by --dims) in one process, and packs the sums that replicas
would exchange: one replica's share of the microbatches (partial), and the whole step's (total).
Prints one JSON object a line: for a model's width, step, stage and kind the bytes per parameter,
the floor below which no code of single values comes, and packing and unpacking in MB of int64 per
second of a core beside a plain copy, which takes turns with them.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.compression import integers
from shoal.coordinator.run_folder import open_run
from shoal.demo import DemoConfig
from shoal.protocol.spec import ResolvedRun, RunSpec, parse_spec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "swarm"))
from reference import Reference  # found by the path above

_ROUNDS = 7
_TEXT_BYTES = 1_500_000


class WatchedReference(Reference):
    """Hands out the stages' sums where the first replica's share is complete, and at the end."""

    def __init__(
        self, run: ResolvedRun, folder: Path, replicas: int, watch: Callable[..., None]
    ) -> None:
        super().__init__(run, folder)
        self._last = run.spec.batch.microbatches - 1
        self._share = (self._last + 1) // replicas
        self._watch = watch

    def _microbatch(self, step: int, microbatch: int) -> float:
        loss: float = super()._microbatch(step, microbatch)
        for kind, last in (("partial", self._share - 1), ("total", self._last)):
            if microbatch == last:
                for stage in self._stages:
                    self._watch(step, stage.spec.stage, kind, stage.sums)
        return loss


def floor_bytes(sums: torch.Tensor) -> float:
    """Entropy per value of sign, first and last significant bit; the bits between count fully."""
    values = sums.numpy()
    magnitude = np.abs(values).astype(np.float64)  # 53 bits are more than the sums have
    lengths = np.frexp(magnitude)[1]
    zeros = np.where(values != 0, np.frexp((values & -values).astype(np.float64))[1] - 1, 0)
    counts = np.bincount(lengths * 64 + zeros)
    shares = counts[counts > 0] / values.size
    between = np.where(values != 0, np.maximum(lengths - zeros - 2, 0) + 1, 0).mean()
    return float((between - (shares * np.log2(shares)).sum()) / 8)


def seconds(work: Callable[[], Any]) -> float:
    """Of this thread's processor time: what else runs on the machine counts less."""
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def measure(sums: torch.Tensor) -> dict[str, Any]:
    codec, payload = integers.encode(sums)
    assert torch.equal(integers.decode(codec, payload, sums.numel()), sums)
    rounds = [
        (
            seconds(lambda: integers.encode(sums)),
            seconds(lambda: integers.decode(codec, payload, sums.numel())),
            seconds(sums.clone),
        )
        for _ in range(_ROUNDS)
    ]
    pack, unpack, copy = (
        sums.nbytes / 1e6 / statistics.median(r) for r in zip(*rounds, strict=True)
    )
    return {
        "codec": codec,
        "bytes_per_parameter": round(len(payload) / sums.numel(), 3),
        "floor": round(floor_bytes(sums), 3),
        "pack_mb_s": round(pack),
        "unpack_mb_s": round(unpack),
        "copy_mb_s": round(copy),
    }


def run_of(dim: int, steps: int, replicas: int, folder: Path) -> ResolvedRun:
    raw = tomllib.loads(DemoConfig(steps=steps, replicas=replicas).run_toml())
    raw["model"] |= {"dim": dim, "ffn_dim": 8 * dim // 3 // 8 * 8}
    raw["model"] |= {"num_heads": dim // 32, "num_kv_heads": max(1, dim // 96)}
    raw["data"]["max_bytes"] = _TEXT_BYTES
    return open_run(parse_spec(RunSpec, raw, "the demo"), folder, lambda phase, done: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", default="64,192", help="widths, multiples of 32")
    parser.add_argument("--steps", default="1,3,10,20", help="steps to look at")
    parser.add_argument("--replicas", type=int, default=2)
    arguments = parser.parse_args()
    steps = {int(step) for step in arguments.steps.split(",")}

    for dim in map(int, arguments.dims.split(",")):

        def watch(step: int, stage: int, kind: str, sums: torch.Tensor, dim: int = dim) -> None:
            if step not in steps:
                return
            where = {"dim": dim, "stage": stage, "parameters": sums.numel(), "step": step}
            print(json.dumps({**where, "kind": kind, **measure(sums)}), flush=True)

        with tempfile.TemporaryDirectory() as folder:
            run = run_of(dim, max(steps), arguments.replicas, Path(folder))
            reference = WatchedReference(run, Path(folder), arguments.replicas, watch)
            reference.truth(max(steps))


if __name__ == "__main__":
    main()
