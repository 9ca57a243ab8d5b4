# SPDX-License-Identifier: Apache-2.0
"""The parts of a conductor, put together."""

from dataclasses import dataclass

from shoal.compression.registry import parse_boundary
from shoal.coordinator.assignments import Assignments, Desk
from shoal.coordinator.between_steps import BetweenSteps
from shoal.coordinator.ending import Ending
from shoal.coordinator.followers import Standbys
from shoal.coordinator.members import Members
from shoal.coordinator.node_events import NodeEvents
from shoal.coordinator.planner import StageNeed, stage_needs
from shoal.coordinator.replays import Replays
from shoal.coordinator.run_log import RunLog
from shoal.coordinator.snapshot_requests import SnapshotRequests
from shoal.coordinator.snapshots import SnapshotStore
from shoal.coordinator.step_runner import StepRunner
from shoal.coordinator.terms import Leadership
from shoal.coordinator.workers import Workers
from shoal.protocol.costs import boundary_shape
from shoal.protocol.fault_injector import Faults
from shoal.protocol.spec import ResolvedRun, RunSpec


@dataclass(frozen=True, slots=True)
class Assembly:
    members: Members
    runner: StepRunner
    requests: SnapshotRequests
    assignments: Assignments
    events: NodeEvents
    between: BetweenSteps
    standbys: Standbys
    ending: Ending


def assemble(
    run: ResolvedRun, log: RunLog, snapshots: SnapshotStore, terms: Leadership, faults: Faults
) -> Assembly:
    spec = run.spec
    members = Members(log, spec.pipeline.stages)
    runner = StepRunner(run, log, members, terms, faults)
    replays = Replays(spec, log, members=members, snapshots=snapshots)
    desk = Desk(log, members, snapshots, replays)
    requests = SnapshotRequests(desk, every=spec.fault.snapshot_every)
    assignments = Assignments(desk, _needs(spec), wanted_replicas=spec.pipeline.replicas)
    workers = Workers(log, members, runner, assignments)
    return Assembly(
        members=members,
        runner=runner,
        requests=requests,
        assignments=assignments,
        events=NodeEvents(log, members, runner, spec.fault, replays, workers=workers, terms=terms),
        between=BetweenSteps(
            spec,
            log,
            members=members,
            runner=runner,
            assignments=assignments,
            workers=workers,
            requests=requests,
            terms=terms,
        ),
        standbys=Standbys(log, members, own_log_id=terms.log_id),
        ending=Ending(log, members, runner),
    )


def _needs(spec: RunSpec) -> tuple[StageNeed, ...]:
    boundary, shape = parse_boundary(spec.pipeline.boundary), boundary_shape(spec)
    assert spec.pipeline.cuts is not None, "a resolved run has cuts"
    return stage_needs(
        spec,
        spec.pipeline.cuts,
        forward_bytes=boundary.forward.max_encoded_bytes(shape),
        backward_bytes=boundary.backward.max_encoded_bytes(shape),
    )
