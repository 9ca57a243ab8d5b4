# SPDX-License-Identifier: Apache-2.0
"""What `shoal check` shows to humans."""

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from shoal.coordinator.check import CheckReport


def render(report: CheckReport) -> RenderableType:
    hardware = report.hardware
    stages = Table(title=f"{report.name}: {report.parameters:,} parameters", title_justify="left")
    for column in ("stage", "layers"):
        stages.add_column(column)
    for column in ("parameters", "FLOP/mb", "window", "memory", "all graphs", "sent/step",
                   "reduced/step", "s/mb"):  # fmt: skip
        stages.add_column(column, justify="right")
    for stage in report.stages:
        style = "red" if stage.fits is False else None
        stages.add_row(
            str(stage.stage),
            f"{stage.start}–{stage.end - 1}",
            f"{stage.parameters:,}",
            f"{stage.flops_per_microbatch:.3g}",
            str(stage.window),
            decimal(stage.memory_bytes),
            decimal(stage.memory_kept_bytes),
            decimal(stage.sent_bytes_per_step),
            decimal(stage.reduce_bytes_per_step),
            f"{max(stage.compute_s, stage.wire_s):.3g}",
            style=style,
        )
    basis = "measured" if hardware.measured else "assumed"
    lines = [
        f"boundary {report.boundary}: {decimal(report.boundary_bytes_per_step)} per step, "
        f"{report.ratio_bf16:.2f}× less than bf16, {report.ratio_fp32:.2f}× less than fp32",
        f"step about {report.step_s:.3g} s, of which {report.reduce_s:.3g} s sum gradients; "
        f"{report.tokens_per_s:,.0f} tokens/s; {report.steps} steps in "
        f"{report.steps * report.step_s / 3600:.3g} h",
        f"{basis}: {hardware.flops:.3g} FLOP/s and {hardware.link_bps / 1e6:g} Mbit/s per node, "
        f"{hardware.latency_s * 1e3:g} ms one way, {report.replicas} replicas per stage",
    ]
    colour = {"fits": "green", "too big": "bold red", "memory unknown": "yellow"}[report.verdict]
    return Group(
        stages,
        *(Text(line) for line in lines),
        *(Text(f"{report.verdict}: {line}", style=colour) for line in report.findings),
        *(Text(f"warning: {line}", style="yellow") for line in report.warnings),
    )
