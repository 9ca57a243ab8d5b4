# SPDX-License-Identifier: Apache-2.0
"""How a coordinator's part in a run ends, and what becomes of its nodes then.

A run that is finished, stopped or failed sends its nodes away for good. A coordinator that doesn't
lead (any more), or can't write, ends without a word to them: they keep their state, and look for
one that does.
"""

from shoal.coordinator.members import Members
from shoal.coordinator.run_log import RunLog
from shoal.coordinator.sessions import Session
from shoal.coordinator.step_runner import Phase, StepRunner
from shoal.protocol.errors import StorageError, TermError, UnreachableError
from shoal.protocol.proto import coordinator_pb2


class Ending:
    def __init__(self, log: RunLog, members: Members, runner: StepRunner) -> None:
        self._log = log
        self._members = members
        self._runner = runner
        self.failed = ""
        """Why, when the end is a bad one."""
        self.can_write = True
        self.deposed: TermError | None = None
        """Why it leads no more, once another coordinator does."""
        self._departed = ""

    @property
    def is_reached(self) -> bool:
        return self._runner.phase is Phase.ENDED

    def require_room(self) -> None:
        """For a node that comes. Raises what sends it elsewhere: `TermError` when another
        coordinator leads by now, `UnreachableError` when this one has given its claim up,
        `StorageError` when it can't write."""
        if self.deposed is not None:
            raise self.deposed
        if self._departed:
            raise UnreachableError(self._departed)
        if not self.can_write:
            raise StorageError(self.failed)

    # ---- nodes go for good ---------------------------------------------------------------

    def complete(self, kind: str, text: str) -> None:
        """The run is finished, or stopped in order."""
        self._runner.phase = Phase.ENDED
        self._log.wait("")
        self._log.say(kind, text)
        for session in self._members.sessions.values():
            self.send_away(session, text)

    def fail(self, reason: str, *, can_write: bool = True) -> None:
        """Without `can_write` the nodes wait for a coordinator that can: nothing was announced
        that isn't in the log."""
        self.can_write = self.can_write and can_write
        if self.failed:
            return
        self.failed = reason
        self._runner.phase = Phase.ENDED
        self._log.wait(reason)
        self._log.say("failed", reason)
        for session in self._members.sessions.values():
            if self.can_write:
                self.send_away(session, f"the run failed: {reason}")
            else:
                session.end()

    def send_away(self, session: Session, reason: str) -> None:
        session.dismissed = True
        session.send(dismiss=coordinator_pb2.Dismiss(reason=reason, come_back=False))
        session.end()

    # ---- nodes go elsewhere --------------------------------------------------------------

    def depose(self, error: TermError) -> None:
        """Another coordinator leads: record nothing more."""
        if self.deposed is None and not self.is_reached:
            self.deposed, self.failed = error, str(error)
            self.depart(str(error))
            self._log.say("deposed", str(error))

    def depart(self, reason: str) -> None:
        self._departed = reason
        self._runner.phase = Phase.ENDED
        self._log.wait(reason)
        self.let_sessions_go()

    def let_sessions_go(self) -> None:
        """Nodes have work elsewhere, or look for it."""
        for session in self._members.sessions.values():
            session.end()
