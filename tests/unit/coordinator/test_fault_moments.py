# SPDX-License-Identifier: Apache-2.0
"""The coordinator dies at each of its moments. What is on the disk then is what the moment says."""

import pytest

from shoal.protocol.fault_injector import NO_FAULTS, Faults
from shoal.protocol.faults import COORDINATOR_MOMENTS, Moment
from shoal.protocol.proto import coordinator_pb2 as pb

from .fake_run import make_run
from .fake_swarm import FakeSwarm
from .swarm_checks import assert_undisturbed


class Died(BaseException):
    """Nothing of the process runs on, as after a SIGKILL."""


class DiesOnce(Faults):
    def __init__(self, moment: Moment, step: int) -> None:
        self.moment, self.step = moment, step
        self.seen: list[Moment] = []

    def reach(self, moment: Moment, step: int) -> None:
        if step == self.step:
            self.seen.append(moment)
        if moment is self.moment and step == self.step:
            raise Died


class Dying(FakeSwarm):
    def __init__(self, moment: Moment, step: int) -> None:
        self.faults = DiesOnce(moment, step)
        super().__init__(make_run(), 4)


def commands(swarm: FakeSwarm, kind: str) -> list[pb.Command]:
    """Those that nodes have not read yet."""
    found = []
    for session in swarm.conductor.sessions.values():
        while not session.outbox.empty():
            command = session.outbox.get_nowait()
            if command is not None and command.WhichOneof("command") == kind:
                found.append(command)
    return found


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("moment", COORDINATOR_MOMENTS)
def test_coordinator_killed_at_a_moment_ends_with_the_same_bits(
    moment: Moment, again: bool
) -> None:
    swarm = Dying(moment, step=2)
    with pytest.raises(Died):
        swarm.finish()
    last = [event.kind for event in swarm.store.read()][-1]
    if moment is Moment.STEP_OPENED:
        assert last == "step_opened"
        assert not commands(swarm, "step_open")
    elif moment is Moment.RECEIPTS_COMPLETE:
        assert last == "step_opened"
        assert swarm.conductor.ledger is not None
        assert not swarm.conductor.ledger.missing()
        assert swarm.conductor.ledger.stages_to_reduce()
    else:
        assert last == "step_committed"
        assert not commands(swarm, "commit")
    if again:  # in the next step, before the soft books of this one are on the disk
        swarm.faults = DiesOnce(moment, 3)
        swarm.restart()
        with pytest.raises(Died):
            finish(swarm)
    swarm.faults = NO_FAULTS
    swarm.restart()
    finish(swarm)
    assert_undisturbed(swarm)


def finish(swarm: FakeSwarm) -> None:
    for node in swarm.nodes.values():
        if node.session is None:
            node.attach()
    swarm.finish()


def test_a_step_reaches_each_moment_once_and_in_order() -> None:
    swarm = Dying(Moment.PREPARED, step=2)
    swarm.finish()
    assert isinstance(swarm.faults, DiesOnce)
    assert swarm.faults.seen == list(COORDINATOR_MOMENTS)
