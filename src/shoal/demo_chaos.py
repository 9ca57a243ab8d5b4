# SPDX-License-Identifier: Apache-2.0
"""Orders faults for the processes of a swarm, and notes what they did and how long it took the run
to go on. What is ordered is drawn in `chaos.py`; the processes carry it out themselves."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from shoal.chaos import NodeFact, Pace, Strike, SwarmFacts, draw, is_due
from shoal.coordinator.dashboard.views import RunView
from shoal.demo_restarter import Restarter
from shoal.demo_summary import Churn, FaultRecord
from shoal.demo_swarm import Process, Swarm
from shoal.protocol.atomic_file import storage_error
from shoal.protocol.fault_injector import FIRED_SUFFIX, read_fired
from shoal.protocol.faults import Action, FiredFault, Moment

PATIENCE_S = 30.0
PATIENCE_STEPS = 6
"""A fault whose moment doesn't come (its node computes nothing now) is no longer waited for; it
may still happen later."""

_STEP_IS_SAFE = (Moment.PREPARED, Moment.COMMITTED, Moment.COMMIT_WRITTEN)
_ENDS = (Action.KILL, Action.TERM)


@dataclass(slots=True)
class _Open:
    """A fault after which the run has yet to commit a step."""

    record: FaultRecord
    time_s: float
    needed_step: int


class Chaos:
    """One fault at a time: the next is drawn when the run has committed a step after the last."""

    def __init__(
        self,
        swarm: Swarm,
        *,
        seed: int,
        pace: Pace,
        started_s: float,
        say: Callable[[str], None],
    ) -> None:
        """`started_s`: Unix time that the records count from."""
        self._swarm = swarm
        self._seed = seed
        self._pace = pace
        self._started_s = started_s
        self._say = say
        self.records: list[FaultRecord] = []
        """What was done, in the order it was noticed."""
        self.quiet = False
        """Draw nothing new for now."""
        self._number = 0
        self._drawn_s = started_s
        self._drawn_step = 0
        self._awaited: Strike | None = None
        self._strikes: dict[str, Strike] = {}
        self._open: list[_Open] = []
        self._read_bytes: dict[str, int] = {}
        self._ended_pids: set[int] = set()

    @property
    def unsettled(self) -> bool:
        """A fault is on its way, or the run has yet to go on after one."""
        return self._awaited is not None or bool(self._open)

    @property
    def last_words(self) -> str:
        """The last fault, for a line that has little room."""
        if not self.records:
            return ""
        record = self.records[-1]
        return f"{record.action} {record.node} in step {record.step}"

    def churn(self, restarter: Restarter) -> Churn:
        """What has happened so far."""
        steps = [record.step for record in self.records]
        killed = [r for r in self.records if r.action == Action.KILL and r.stage is not None]
        return Churn(
            first_step=min(steps, default=0),
            settled_step=max(steps) + 2 if steps else None,
            nodes_killed=len(killed),
            nodes_joined_late=restarter.nodes_joined_late,
            crashes=restarter.crashes,
            faults=self.records,
        )

    def restart_clock(self, now_s: float) -> None:
        """The time to the next fault counts from now."""
        self._drawn_s = now_s

    def ended_on_order(self, process: Process) -> bool:
        """Whether one of the faults has ended it."""
        self._note_fired()
        return process.pid in self._ended_pids

    def observe(self, view: RunView | None, now_s: float) -> None:
        """Call it often. `view` is None while the coordinator is away; `now_s` is Unix time."""
        self._note_fired()
        if view is None:
            return
        over = view.state in ("finished", "failed")
        for fault in [f for f in self._open if view.step >= f.needed_step or over]:
            self._open.remove(fault)
            fault.record.recovered_after_s = round(max(0.0, now_s - fault.time_s), 3)
            self._say(f"the run went on {fault.record.recovered_after_s:.1f} s after the fault")
        awaited = self._awaited
        if awaited is not None and (
            now_s - self._drawn_s > PATIENCE_S or view.step > awaited.fault.step + PATIENCE_STEPS
        ):
            self._awaited = None
        if not (self.unsettled or self.quiet or over) and is_due(
            self._pace,
            self._seed,
            self._number,
            steps_since=view.step - self._drawn_step,
            seconds_since=now_s - self._drawn_s,
        ):
            self._order(view, now_s)

    # ---- ordering ------------------------------------------------------------------------

    def _order(self, view: RunView, now_s: float) -> None:
        strike = draw(self._seed, self._number, self._facts(view))
        if strike is None:
            return
        self._number += 1
        self._drawn_s, self._drawn_step = now_s, view.step
        self._awaited = self._strikes[strike.fault.id] = strike
        target = next(p for p in self._swarm.processes if p.name == strike.process)
        assert target.faults is not None, "the swarm was started without faults"
        line = strike.fault.model_dump_json(exclude_defaults=True).encode() + b"\n"
        try:
            with target.faults.open("ab", buffering=0) as file:  # in one write
                file.write(line)
        except OSError as error:
            raise storage_error(target.faults, error) from None

    def _facts(self, view: RunView) -> SwarmFacts:
        by_pid = {process.pid: process for process in self._swarm.nodes if process.alive}
        return SwarmFacts(
            step=view.step,
            total_steps=view.total_steps,
            num_stages=view.spec_summary.num_stages,
            microbatches=view.spec_summary.microbatches,
            nodes=tuple(
                NodeFact(by_pid[node.pid].name, node.name, stage.stage)
                for stage in view.stages
                for node in stage.nodes
                if node.pid in by_pid and node.state in ("ready", "training")
            ),
        )

    # ---- what was done -------------------------------------------------------------------

    def _note_fired(self) -> None:
        for process in self._swarm.processes:
            if process.faults is None:
                continue
            fired_file = process.faults.with_name(process.faults.name + FIRED_SUFFIX)
            try:
                size = os.stat(fired_file).st_size
            except OSError:
                continue
            if size == self._read_bytes.get(process.name):
                continue
            self._read_bytes[process.name] = size
            for fired in read_fired(process.faults):
                strike = self._strikes.pop(fired.id, None)
                if strike is not None:
                    self._note(strike, fired)

    def _note(self, strike: Strike, fired: FiredFault) -> None:
        if self._awaited is strike:
            self._awaited = None
        if fired.action in _ENDS:
            self._ended_pids.add(fired.pid)
        record = FaultRecord(
            step=fired.step,
            moment=fired.moment.value,
            action=fired.action.value,
            node=strike.name,
            stage=strike.stage,
            seconds=strike.fault.seconds,
            at_s=round(fired.time_s - self._started_s, 3),
            others=strike.others,
        )
        self.records.append(record)
        # A node that has prepared, or is asked to leave, owes this step nothing: the next one
        # shows what it costs that it is gone.
        spared = fired.moment in _STEP_IS_SAFE or fired.action is Action.TERM
        needed = fired.step + spared
        self._open.append(_Open(record, fired.time_s, needed))
        self._say(describe(strike, fired))


_WHEN = {
    Moment.FORWARD_RECEIVED: "as an activation arrived",
    Moment.FORWARD_SENT: "after it had sent an activation",
    Moment.BACKWARD_RECEIVED: "as a gradient arrived",
    Moment.GRADIENT_ACCUMULATED: "after it had added a gradient",
    Moment.MID_REDUCE: "in the middle of the reduction",
    Moment.PREPARED: "after it had prepared",
    Moment.COMMITTED: "as the commit arrived",
    Moment.STEP_OPENED: "before it announced the step",
    Moment.RECEIPTS_COMPLETE: "when the last receipt was in",
    Moment.COMMIT_WRITTEN: "before it announced the commit",
}


def describe(strike: Strike, fired: FiredFault) -> str:
    """ "fault: SIGKILL to deep-perch (node-3, stage 1) in step 5, as a gradient arrived"."""
    who = "the coordinator"
    if strike.stage is not None:
        who = f"{strike.name} ({strike.process}, stage {strike.stage})"
    seconds = f"{strike.fault.seconds:g} s"
    match fired.action:
        case Action.KILL:
            what = f"SIGKILL to {who}"
        case Action.TERM:
            what = f"SIGTERM to {who}"
        case Action.STOP:
            what = f"{who} stopped for {seconds}"
        case Action.DROP_LINK:
            what = f"a link of {who} cut for {seconds}"
        case Action.DELAY_LINK:
            what = f"a link of {who} slower by {strike.fault.delay_s:g} s a tensor for {seconds}"
        case Action.FULL_DISK:
            what = f"the disk of {who} full for {seconds}"
        case _:
            what = f"{fired.action.value} at {who}"
    return f"fault: {what} in step {fired.step}, {_WHEN[fired.moment]}"
