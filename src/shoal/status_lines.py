# SPDX-License-Identifier: Apache-2.0
"""What `shoal status` says below the table of nodes, as (label, text)."""

from collections.abc import Iterator, Sequence

from shoal.coordinator.dashboard.views import (
    BoundaryView,
    RecoveryView,
    ReplayView,
    RunView,
    TrafficView,
)
from shoal.units import human_bytes, human_seconds

MAX_BOUNDARIES = 8
RECENT_RECOVERIES = 3

Line = tuple[str, str]


def boundary_lines(boundaries: Sequence[BoundaryView]) -> Iterator[Line]:
    """ "boundary 0–1", "3.1 MB a step forward (bf16 6.2 MB), 1.6 MB backward (bf16 6.2 MB)"."""
    for boundary in boundaries[:MAX_BOUNDARIES]:
        parts = [
            f"{human_bytes(part.encoded_bytes)}{' a step' if i == 0 else ''} {part.kind}"
            + _beside_bf16(part)
            for i, part in enumerate(boundary.traffic)
        ]
        yield f"boundary {boundary.from_stage}–{boundary.to_stage}", ", ".join(parts)
    if len(boundaries) > MAX_BOUNDARIES:
        yield "", f"and {len(boundaries) - MAX_BOUNDARIES} more boundaries"


def _beside_bf16(part: TrafficView) -> str:
    """Empty where the encoding takes as much."""
    if part.bf16_bytes is None or part.bf16_bytes == part.encoded_bytes:
        return ""
    return f" (bf16 {human_bytes(part.bf16_bytes)})"


def safeguard_lines(view: RunView) -> Iterator[Line]:
    """Who leads, what is kept against losses, and which there were. Only what there is."""
    if leads := leadership(view):
        yield "coordinator", leads
    if view.log_bytes:
        yield (
            "boundary logs",
            f"{human_bytes(view.log_bytes)} in all; at most {human_bytes(view.log_budget_bytes)} "
            "at each node",
        )
    for replay in view.replaying:
        yield "replay", _under_way(replay)
    if view.replays:
        yield (
            "replays",
            f"{view.replays}, in {human_seconds(view.replay_seconds)}, out of "
            f"{human_bytes(view.replay_bytes)} of logs",
        )
    if view.rollbacks:
        yield "rollbacks", f"{view.rollbacks}, in {human_seconds(view.rollback_seconds)}"
    for recovery in view.recoveries[-RECENT_RECOVERIES:]:
        yield "", f"{human_seconds(view.now_s - recovery.time_s)} ago: {recovery_text(recovery)}"
    if view.back_offs is not None:
        offs = view.back_offs
        yield (
            "numbers",
            f"{offs.count} back-off{'s' * (offs.count > 1)}, the last in step {offs.step:,}: "
            f"{offs.reason}",
        )


def _under_way(replay: ReplayView) -> str:
    done, of = replay.step - replay.from_step, replay.to_step - replay.from_step
    return (
        f"{replay.node} computes stage {replay.stage} again: {done} of {of} steps, up to step "
        f"{replay.to_step:,}, for {human_seconds(replay.seconds)}"
    )


def recovery_text(recovery: RecoveryView) -> str:
    """In plain words."""
    took = "" if recovery.seconds is None else f", {recovery.seconds:.1f} s"
    if recovery.kind == "replay":
        return (
            f"stage {recovery.stage} was replayed from step {recovery.from_step:,} to "
            f"{recovery.to_step:,}{took}, {human_bytes(recovery.log_bytes)} of logs"
        )
    under_way = "; not caught up yet" if recovery.seconds is None else ""
    return (
        f"the run went back from step {recovery.from_step:,} to {recovery.to_step:,}{took}"
        f"{under_way}: {recovery.reason}"
    )


def leadership(view: RunView) -> str:
    """ "10.0.0.5:7600 leads in term 3 · standby 10.0.0.7:7001 (up to date)"; empty for a run that
    was never led by another, and that nobody stands by for."""
    if view.leads and not view.standbys and view.term <= 1:
        return ""
    who = view.coordinator or "this coordinator"
    verb = "leads" if view.leads else "doesn't lead"
    parts = [f"{who} {verb} in term {view.term}"]
    for standby in view.standbys:
        if not standby.connected:
            state = "away"
        elif standby.events_behind:
            state = f"{standby.events_behind} event{'s' * (standby.events_behind > 1)} behind"
        else:
            state = "up to date"
        parts.append(f"standby {standby.address} ({state})")
    return " · ".join(parts)
