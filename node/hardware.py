# SPDX-License-Identifier: Apache-2.0
"""What this machine can compute with, found by trying: device, memory, speed, dtype."""

import logging
import platform
import time
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from shoal.protocol.errors import CapacityError
from shoal.protocol.proto import coordinator_pb2

log = logging.getLogger(__name__)

ComputeDtype = Literal["fp32", "bf16", "fp16"]

_PROBE_SIZE = 384
_MEMORY_SHARE = 0.6
"""Of what is free now; the rest stays with the machine's owner."""


@dataclass(frozen=True, slots=True)
class Device:
    torch_device: torch.device
    name: str
    memory_bytes: int
    flops: float
    """Measured dense matrix speed in FLOP/s."""
    compute_dtype: ComputeDtype
    num_threads: int

    @property
    def kernel_class(self) -> str:
        """Nodes of one class compute the same bits."""
        return "/".join(
            (self.torch_device.type, self.name, torch.__version__, self.compute_dtype,
             f"{self.num_threads}t")
        )  # fmt: skip

    def to_proto(self) -> coordinator_pb2.Hardware:
        return coordinator_pb2.Hardware(
            device=self.torch_device.type,
            device_name=self.name,
            memory_bytes=self.memory_bytes,
            flops=self.flops,
            kernel_class=self.kernel_class,
            compute_dtype=self.compute_dtype,
        )


def probe(wanted: str = "auto", *, num_threads: int = 1, max_memory_bytes: int = 0) -> Device:
    """Choose CUDA, MPS or CPU and measure it. Takes a fraction of a second.

    Raises `CapacityError` when `wanted` ("auto", "cpu", "cuda", "cuda:1", "mps") isn't there.
    """
    torch.set_num_threads(num_threads)
    device = _choose(wanted)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = properties.name
        free, _ = torch.cuda.mem_get_info(device)
        dtype: ComputeDtype = "bf16" if properties.major >= 8 else "fp16"
    elif device.type == "mps":
        name, free, dtype = "Apple GPU", psutil.virtual_memory().available, "fp32"
    else:
        name = _cpu_name()
        free, dtype = psutil.virtual_memory().available, "fp32"
    memory = int(free * _MEMORY_SHARE)
    if max_memory_bytes:
        memory = min(memory, max_memory_bytes)
    return Device(
        torch_device=device,
        name=name,
        memory_bytes=memory,
        flops=_measure(device, dtype),
        compute_dtype=dtype,
        num_threads=num_threads,
    )


def _choose(wanted: str) -> torch.device:
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        if torch.backends.mps.is_available():
            return torch.device("mps")
        return torch.device("cpu")
    device = torch.device(wanted)
    match device.type:
        case "cpu":
            there = True
        case "cuda":
            there = torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
        case "mps":
            there = torch.backends.mps.is_available()
        case _:
            there = False
    if not there:
        raise CapacityError(
            f"device = {wanted!r} isn't available to this PyTorch ({torch.__version__}); "
            "use --device auto, or install a PyTorch build for it"
        )
    return device


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _measure(device: torch.device, dtype: ComputeDtype) -> float:
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    size = _PROBE_SIZE if device.type == "cpu" else 8 * _PROBE_SIZE
    a = torch.ones(size, size, dtype=kind, device=device)

    def once() -> float:
        started = time.perf_counter()
        (a @ a).sum().item()  # .item() waits for the device
        return time.perf_counter() - started

    once()
    return float(2 * size**3 / min(once() for _ in range(3)))
