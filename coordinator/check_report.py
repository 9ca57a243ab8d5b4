# SPDX-License-Identifier: Apache-2.0
"""What `shoal check` shows to humans."""

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from shoal.coordinator.check import CheckReport


def render(report: CheckReport) -> RenderableType:
    hardware = report.hardware
    stages = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("stage", "layers", "params", "window", "credit", "memory", "graphs", "sent",
                   "reduced", "s/mb"):  # fmt: skip
        stages.add_column(column, justify="right")
    for stage in report.stages:
        stages.add_row(
            str(stage.stage),
            f"{stage.start}–{stage.end - 1}",
            _short(stage.parameters),
            str(stage.window),
            _short(stage.credit_bytes),
            _short(stage.memory_bytes),
            f"+{_short(stage.memory_kept_bytes - stage.memory_bytes)}",
            _short(stage.sent_bytes_per_step),
            _short(stage.reduce_bytes_per_step),
            f"{max(stage.compute_s, stage.wire_s):.2g}",
            style="red" if stage.fits is False else None,
        )
    legend = (
        "Bytes: a credit is a boundary tensor that waits; memory is the least, graphs what keeping "
        "all autograd graphs adds; sent and reduced are per step; s/mb is seconds per microbatch."
    )
    basis = "measured" if hardware.measured else "assumed"
    at_most = "" if report.boundary_bytes_exact else "at most "
    lines = [
        f"boundary {report.boundary}: {at_most}{decimal(report.boundary_bytes_per_step)} per step, "
        f"{report.ratio_bf16:.2f}× less than bf16, {report.ratio_fp32:.2f}× less than fp32",
        f"step about {report.step_s:.3g} s, of which {report.reduce_s:.3g} s sum gradients; "
        f"{report.tokens_per_s:,.0f} tokens/s; {report.steps} steps in "
        f"{report.steps * report.step_s / 3600:.3g} h",
        f"{basis}: {hardware.flops:.3g} FLOP/s and {hardware.link_bps / 1e6:g} Mbit/s per node, "
        f"{hardware.latency_s * 1e3:g} ms one way, {report.replicas} replicas per stage",
    ]
    colour = {"fits": "green", "too big": "bold red", "memory unknown": "yellow"}[report.verdict]
    return Group(
        Text(f"{report.name}: {report.parameters:,} parameters", style="bold"),
        stages,
        Text(legend, style="dim"),
        *(Text(line) for line in lines),
        *(Text(f"{report.verdict}: {line}", style=colour) for line in report.findings),
        *(Text(f"warning: {line}", style="yellow") for line in report.warnings),
    )


def _short(count: float) -> str:
    """Three digits and a unit: "12.3M"."""
    for unit in ("", "k", "M", "G"):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"
