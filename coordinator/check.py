# SPDX-License-Identifier: Apache-2.0
"""`shoal check`: memory, bytes and time of a run, before anything starts.

Everything here is arithmetic on the spec (protocol/costs.py) and on assumed or measured hardware;
no model is built and nothing is opened.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from rich.filesize import decimal

from shoal.compression.registry import Boundary, parse_boundary
from shoal.coordinator import planner
from shoal.protocol import costs
from shoal.protocol.errors import CapacityError, ConfigError
from shoal.protocol.learned import LearnedSpec, learned_codec
from shoal.protocol.schedule import in_flight_window
from shoal.protocol.spec import RunSpec, StageSpec

_UNEVEN = 1.5
_LINK_BOUND = 1.1


class HardwareAssumption(BaseModel):
    """One node and its link; every node is taken to be such a one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    flops: float = Field(default=10e12, gt=0)
    """FLOP/s reached in matrix products. The default is a mid-range home GPU in bf16."""
    link_bps: float = Field(default=20e6, gt=0)
    """Bit/s in the slower direction, usually the upload."""
    latency_s: float = Field(default=0.04, ge=0)
    """One way."""
    memory_bytes: int | None = Field(default=None, gt=0)
    """That a node gives to a stage; None judges no memory."""
    measured: bool = False


class StageReport(BaseModel):
    model_config = ConfigDict(frozen=True)

    stage: int
    start: int
    end: int
    """Layers `start` to `end`, exclusive."""
    parameters: int
    flops_per_microbatch: int
    """Forward and backward, without recomputation."""
    window: int
    """Microbatches in flight."""
    credit_bytes: int
    """What a credit costs: a decoded boundary tensor that waits here. 0 on the first stage."""
    memory_bytes: int
    """With one autograd graph at a time, the rest recomputed."""
    memory_kept_bytes: int
    """With the graph of every microbatch in flight."""
    recomputes: bool
    """Whether the time estimate counts a second forward."""
    fits: bool | None
    """None where no memory is given."""
    sent_bytes_per_step: int
    """Boundary tensors that all the stage's replicas send, both legs."""
    reduce_bytes_per_step: int
    """What each replica sends to sum gradients."""
    compute_s: float
    """Per microbatch on one replica."""
    wire_s: float


class CheckReport(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    hardware: HardwareAssumption
    vocab_size: int
    parameters: int
    cuts: tuple[int, ...]
    replicas: int
    stages: tuple[StageReport, ...]
    boundary: str
    """Canonical spec."""
    forward_bytes: int
    """A boundary tensor's encoded size; the largest, where it depends on the data."""
    backward_bytes: int
    boundary_bytes_exact: bool
    """False where they, and what follows from them, are upper bounds."""
    boundary_bytes_per_step: int
    """All boundaries, microbatches and legs."""
    ratio_bf16: float
    """Dense bf16 bytes over encoded bytes."""
    ratio_fp32: float
    tokens_per_step: int
    step_s: float
    reduce_s: float
    tokens_per_s: float
    steps: int
    verdict: Literal["fits", "too big", "memory unknown"]
    findings: tuple[str, ...]
    warnings: tuple[str, ...]


def resolve_vocab_size(spec: RunSpec, vocab_size: int | None = None) -> int:
    """The first that is known of: the argument, the model's, the tokenizer's by its name."""
    if vocab_size:
        return vocab_size
    if spec.model.vocab_size:
        return spec.model.vocab_size
    tokenizer = spec.data.tokenizer
    if match := re.fullmatch(r"bpe:([1-9][0-9]{0,6})", tokenizer, re.ASCII):
        return int(match[1])
    if tokenizer == "byte":
        return 257  # every byte and end-of-text
    raise ConfigError(
        f"data.tokenizer = {tokenizer!r} does not say how large its vocabulary is; "
        "set model.vocab_size"
    )


def check_boundary(spec: RunSpec) -> Boundary:
    """The codecs of the run's boundaries. Raises `ConfigError` for unknown ones."""
    try:
        return parse_boundary(spec.pipeline.boundary)
    except ConfigError as error:
        raise ConfigError(f"pipeline.{error}") from None


def check_run(
    spec: RunSpec,
    vocab_size: int | None = None,
    hardware: HardwareAssumption | None = None,
) -> CheckReport:
    """Raises `ConfigError` for a boundary spec or vocabulary that can't be resolved. Stages too
    big for `hardware` are a verdict, not an error."""
    hardware = hardware or HardwareAssumption()
    vocab_size = resolve_vocab_size(spec, vocab_size)
    spec = spec.model_copy(
        update={"model": spec.model.model_copy(update={"vocab_size": vocab_size})}
    )
    boundary = check_boundary(spec)
    shape = costs.boundary_shape(spec)
    estimate = _Estimate(
        spec=spec,
        hardware=hardware,
        forward_bytes=boundary.forward.max_encoded_bytes(shape),
        backward_bytes=boundary.backward.max_encoded_bytes(shape),
    )
    cuts = estimate.cuts()
    stages = tuple(estimate.report(stage) for stage in planner.stage_specs(spec.model, cuts))
    reduce_s = estimate.reduce_s(stages)
    step_s = costs.step_seconds(
        [costs.StageTime(compute_s=stage.compute_s, wire_s=stage.wire_s) for stage in stages],
        microbatches=spec.batch.microbatches,
        replicas=spec.pipeline.replicas,
        hop_s=estimate.hop_s,
        latency_s=hardware.latency_s,
        reduce_s=reduce_s,
    )
    encoded_bytes = estimate.forward_bytes + estimate.backward_bytes
    verdict, findings = _judge(stages, hardware)
    return CheckReport(
        name=spec.name,
        hardware=hardware,
        vocab_size=vocab_size,
        parameters=costs.run_parameters(spec, planner.stage_specs(spec.model, cuts)),
        cuts=cuts,
        replicas=spec.pipeline.replicas,
        stages=stages,
        boundary=boundary.spec,
        forward_bytes=estimate.forward_bytes,
        backward_bytes=estimate.backward_bytes,
        boundary_bytes_exact=None
        not in (boundary.forward.encoded_bytes(shape), boundary.backward.encoded_bytes(shape)),
        boundary_bytes_per_step=costs.boundary_bytes_per_step(
            spec, estimate.forward_bytes, estimate.backward_bytes
        ),
        ratio_bf16=2 * 2 * math.prod(costs.dense_boundary_shape(spec)) / encoded_bytes,
        ratio_fp32=2 * 4 * math.prod(costs.dense_boundary_shape(spec)) / encoded_bytes,
        tokens_per_step=spec.tokens_per_step,
        step_s=step_s,
        reduce_s=reduce_s,
        tokens_per_s=spec.tokens_per_step / step_s,
        steps=spec.steps,
        verdict=verdict,
        findings=findings,
        warnings=_warnings(spec, stages, boundary, step_s=step_s, reduce_s=reduce_s),
    )


@dataclass(frozen=True, slots=True)
class _Estimate:
    """A run with resolved vocabulary on assumed hardware; encoded sizes per boundary tensor."""

    spec: RunSpec
    hardware: HardwareAssumption
    forward_bytes: int
    backward_bytes: int

    @property
    def learned(self) -> LearnedSpec | None:
        return learned_codec(self.spec.pipeline.boundary)

    @property
    def hop_s(self) -> float:
        return max(self.forward_bytes, self.backward_bytes) * 8 / self.hardware.link_bps

    def reduce_s(self, stages: tuple[StageReport, ...]) -> float:
        """Of the largest stage; stages reduce side by side, on links of their own."""
        if self.spec.pipeline.replicas == 1:
            return 0.0
        largest = max(stage.reduce_bytes_per_step for stage in stages)
        return largest * 8 / self.hardware.link_bps + 2 * self.hardware.latency_s

    def cuts(self) -> tuple[int, ...]:
        limit = self.hardware.memory_bytes
        try:
            return planner.plan_cuts(
                self.spec, lambda stage: limit is None or self._least(stage) <= limit
            )
        except CapacityError:
            # Report what the most even cuts would need; the verdict says that it is too much.
            return planner.plan_cuts(self.spec)

    def report(self, stage: StageSpec) -> StageReport:
        spec, limit = self.spec, self.hardware.memory_bytes
        window, mode = self._window(stage), spec.pipeline.recompute
        kept = self._memory(stage, window)
        recomputes = mode == "always" or (mode == "auto" and limit is not None and kept > limit)
        time = self._time(stage, recompute=recomputes)
        parameters = costs.stage_parameters(spec.model, stage, self.learned)
        sent_bytes = costs.sent_bytes(stage, self.forward_bytes, self.backward_bytes)
        return StageReport(
            stage=stage.stage,
            start=stage.start,
            end=stage.end,
            parameters=parameters,
            flops_per_microbatch=spec.tokens_per_microbatch
            * (
                costs.stage_forward_flops(spec.model, stage, self.learned)
                + costs.stage_backward_flops(spec.model, stage, learned=self.learned)
            ),
            window=window,
            credit_bytes=0
            if stage.is_first
            else costs.FP32_BYTES * math.prod(costs.boundary_shape(spec)),
            memory_bytes=self._memory(stage, 1),
            memory_kept_bytes=kept,
            recomputes=recomputes,
            fits=None if limit is None else self._least(stage) <= limit,
            sent_bytes_per_step=spec.batch.microbatches * sent_bytes,
            reduce_bytes_per_step=costs.reduce_bytes_per_replica(
                parameters, spec.pipeline.replicas
            ),
            compute_s=time.compute_s,
            wire_s=time.wire_s,
        )

    def _window(self, stage: StageSpec) -> int:
        """At the stage's own pace; a slower stage elsewhere makes it smaller."""
        window = in_flight_window(
            stage.stage,
            stage.num_stages,
            hop_s=self.hop_s,
            latency_s=self.hardware.latency_s,
            period_s=self._time(stage, recompute=False).period_s,
        )
        return min(window, self.spec.batch.microbatches)

    def _memory(self, stage: StageSpec, graphs_kept: int) -> int:
        return costs.stage_memory(
            self.spec,
            stage,
            window=self._window(stage),
            graphs_kept=graphs_kept,
            forward_bytes=self.forward_bytes,
            backward_bytes=self.backward_bytes,
        ).total

    def _least(self, stage: StageSpec) -> int:
        keep = self.spec.pipeline.recompute == "never"
        return self._memory(stage, self._window(stage) if keep else 1)

    def _time(self, stage: StageSpec, *, recompute: bool) -> costs.StageTime:
        model, learned = self.spec.model, self.learned
        forward = costs.stage_forward_flops(model, stage, learned)
        backward = costs.stage_backward_flops(model, stage, recompute=recompute, learned=learned)
        busier_bytes = max(
            costs.sent_bytes(stage, self.forward_bytes, self.backward_bytes),
            costs.received_bytes(stage, self.forward_bytes, self.backward_bytes),
        )
        return costs.StageTime(
            compute_s=(forward + backward) * self.spec.tokens_per_microbatch / self.hardware.flops,
            wire_s=busier_bytes * 8 / self.hardware.link_bps,
        )


def _judge(
    stages: tuple[StageReport, ...], hardware: HardwareAssumption
) -> tuple[Literal["fits", "too big", "memory unknown"], tuple[str, ...]]:
    if hardware.memory_bytes is None:
        largest = max(stages, key=lambda stage: stage.memory_bytes)
        return "memory unknown", (
            f"every node needs up to {decimal(largest.memory_bytes)} (stage {largest.stage})",
        )
    limit = decimal(hardware.memory_bytes)
    too_big = tuple(
        f"stage {stage.stage} needs {decimal(stage.memory_bytes)}, or "
        f"{decimal(stage.memory_kept_bytes)} with all graphs kept; a node gives {limit}: use more "
        "stages, a smaller microbatch_size, or pipeline.recompute = 'auto'"
        for stage in stages
        if not stage.fits
    )
    if too_big:
        return "too big", too_big
    recomputing = [str(stage.stage) for stage in stages if stage.recomputes]
    how = f"; recomputing on stage {', '.join(recomputing)}" if recomputing else ""
    return "fits", (f"every stage fits {limit}{how}",)


def _warnings(
    spec: RunSpec,
    stages: tuple[StageReport, ...],
    boundary: Boundary,
    *,
    step_s: float,
    reduce_s: float,
) -> tuple[str, ...]:
    warnings = []
    compute = [stage.compute_s for stage in stages]
    if max(compute) > _UNEVEN * min(compute):
        slowest = max(stages, key=lambda stage: stage.compute_s)
        warnings.append(
            f"stage {slowest.stage} computes {max(compute) / min(compute):.1f} times as long as "
            "the lightest; give it more replicas, or change pipeline.stages"
        )
    wire_s = max(stage.wire_s for stage in stages)
    if len(stages) > 1 and wire_s > _LINK_BOUND * max(compute):
        warnings.append(
            f"links set the pace: {wire_s:.3g} s per microbatch against {max(compute):.3g} s of "
            "arithmetic; use a smaller codec, or fewer stages with more layers each"
        )
    if reduce_s > step_s / 2:
        warnings.append(
            f"summing gradients takes {reduce_s:.3g} s of a {step_s:.3g} s step; more microbatches "
            "per step, or more stages with fewer replicas, make it matter less"
        )
    in_parallel = spec.pipeline.stages * spec.pipeline.replicas
    if spec.batch.microbatches < in_parallel:
        warnings.append(
            f"batch.microbatches = {spec.batch.microbatches} keeps at most so many of "
            f"{in_parallel} nodes busy; {4 * in_parallel} would keep them busy most of the time"
        )
    if len(stages) > 1 and boundary.backward.spec.partition("|")[0] == "fp16":
        warnings.append("gradients below 6e-5 lose bits in fp16; bf16 costs the same")
    return tuple(warnings)
