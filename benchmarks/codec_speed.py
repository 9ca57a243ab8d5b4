# SPDX-License-Identifier: Apache-2.0
"""How fast each codec is on one core, and below which link speed it pays off.

    python benchmarks/codec_speed.py [SPEC …] [--rounds 9] [--json FILE]

Every round times, in an order that alternates, a plain copy of an fp32 tensor and each codec's
encoding and decoding of it; a figure is the median over rounds, and its ratio to the copy the
median of the rounds' own ratios. Times are the thread's CPU time, so that a busy machine disturbs
less. MB/s count the fp32 tensor's bytes. "Pays below" is the link
speed at which bf16 takes as long: encode, send, decode, one after the other. Where arithmetic and
wire overlap, a codec pays off above that, too.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from shoal.compression.codec import CodecContext, Leg, WireCodec
from shoal.compression.registry import parse_boundary

SPECS = (
    "fp32", "bf16", "fp16", "int8:rn", "int8:sr", "int8:c", "int8:rot", "int4:rn", "int4:sr",
    "int4:c", "int4:rot", "int4:rot:sr", "fp8", "topk:10%", "shuffle", "zstd:3", "shuffle|zstd:1",
    "shuffle|zstd:3", "shuffle|lz4", "int8:rn|zstd:3", "int4:rn|zstd:3",
)  # fmt: skip
SHAPE = (4, 512, 1024)
BASELINE = "bf16"


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one codec on one kind of tensor."""

    spec: str
    kind: str
    bits_per_value: float
    error: float
    """|x - x̂| / |x|, both Euclidean norms."""
    encode_mb_per_s: float
    decode_mb_per_s: float
    encode_copies: float
    """As long as so many plain copies."""
    decode_copies: float
    pays_below_mbit_per_s: float | None
    """Against bf16; None where it takes no longer, so that it always pays off (or sends as much,
    so that it never does: `bits_per_value` tells)."""


def pays_below_mbit_per_s(*, saved_bytes: float, extra_s: float) -> float | None:
    """The link speed at which sending `saved_bytes` takes `extra_s`."""
    if saved_bytes <= 0 or extra_s <= 0:
        return None
    return 8e-6 * saved_bytes / extra_s


def activations(generator: torch.Generator) -> torch.Tensor:
    """A residual stream's: channels of many sizes, a few of them large."""
    sizes = torch.exp(0.5 * torch.randn(SHAPE[-1], generator=generator))
    sizes[:: SHAPE[-1] // 8] *= 15
    return torch.randn(SHAPE, generator=generator) * sizes


def gradients(generator: torch.Generator) -> torch.Tensor:
    """About 1e-6, with heavy tails: tokens differ a lot."""
    tokens = torch.exp(torch.randn(*SHAPE[:-1], 1, generator=generator))
    return torch.randn(SHAPE, generator=generator) * tokens * 1e-6


def _seconds(call: Callable[[], object]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started


def measure(specs: list[str], kind: str, leg: Leg, *, rounds: int) -> list[Speed]:
    generator = torch.Generator().manual_seed(0)
    tensor = (activations if leg == "forward" else gradients)(generator)
    context = CodecContext(run_seed=0, step=1, microbatch=0, boundary=0, leg=leg)
    target = torch.empty_like(tensor)
    codecs: dict[str, WireCodec] = {spec: parse_boundary(spec).forward for spec in specs}
    payloads = {spec: codec.encode(tensor, context) for spec, codec in codecs.items()}
    copies: list[float] = []
    encodes: dict[str, list[float]] = {spec: [] for spec in specs}
    decodes: dict[str, list[float]] = {spec: [] for spec in specs}
    for number in range(rounds + 1):
        copy_s = _seconds(lambda: target.copy_(tensor))
        for spec in specs if number % 2 else reversed(specs):
            codec, payload = codecs[spec], payloads[spec]
            encode_s = _seconds(lambda codec=codec: codec.encode(tensor, context))
            decode_s = _seconds(
                lambda codec=codec, payload=payload: codec.decode(payload, SHAPE, context)
            )
            if number:  # the first round warms up
                encodes[spec].append(encode_s)
                decodes[spec].append(decode_s)
        copies.append((copy_s + _seconds(lambda: target.copy_(tensor))) / 2)
    del copies[0]
    num_bytes = tensor.numel() * 4

    def median_s(spec: str) -> float:
        return statistics.median(a + b for a, b in zip(encodes[spec], decodes[spec], strict=True))

    found = []
    for spec in specs:
        decoded = codecs[spec].decode(payloads[spec], SHAPE, context)
        extra_s = median_s(spec) - median_s(BASELINE)
        found.append(
            Speed(
                spec=codecs[spec].spec,
                kind=kind,
                bits_per_value=len(payloads[spec]) * 8 / tensor.numel(),
                error=((decoded - tensor).norm() / tensor.norm()).item(),
                encode_mb_per_s=num_bytes / 1e6 / statistics.median(encodes[spec]),
                decode_mb_per_s=num_bytes / 1e6 / statistics.median(decodes[spec]),
                encode_copies=statistics.median(
                    a / b for a, b in zip(encodes[spec], copies, strict=True)
                ),
                decode_copies=statistics.median(
                    a / b for a, b in zip(decodes[spec], copies, strict=True)
                ),
                pays_below_mbit_per_s=pays_below_mbit_per_s(
                    saved_bytes=len(payloads[BASELINE]) - len(payloads[spec]), extra_s=extra_s
                ),
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", nargs="*", default=list(SPECS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="append a line per codec and kind of tensor")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    specs = list(dict.fromkeys([BASELINE, *arguments.specs]))
    lines = []
    for kind, leg in (("activations", "forward"), ("gradients", "backward")):
        print(f"{kind}\n{'':22} bits  error   in MB/s  out MB/s  copies in/out   pays below Mbit/s")
        for speed in measure(specs, kind, leg, rounds=arguments.rounds):  # type: ignore[arg-type]
            below = speed.pays_below_mbit_per_s
            print(
                f"{speed.spec:22} {speed.bits_per_value:5.2f} {speed.error:7.4f} "
                f"{speed.encode_mb_per_s:8.0f} {speed.decode_mb_per_s:9.0f} "
                f"{speed.encode_copies:7.1f} {speed.decode_copies:6.1f} "
                f"{'-' if below is None else f'{below:,.0f}':>16}",
                flush=True,
            )
            lines.append(json.dumps(asdict(speed)))
    if arguments.json:
        with arguments.json.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
