# SPDX-License-Identifier: Apache-2.0
"""A run's standbys: who is registered, whom nodes are told of, and who is connected now."""

from dataclasses import dataclass

from shoal.coordinator.members import Members
from shoal.coordinator.run_log import RunLog
from shoal.coordinator.sessions import Session
from shoal.coordinator.state import StandbyRegistered
from shoal.protocol.proto import coordinator_pb2


@dataclass(slots=True)
class Follower:
    address: str
    sequence: int = 0
    """The newest event that was sent to it."""
    snapshots: tuple[int, ...] = ()
    """Steps of the complete snapshots that it had when it connected."""


class Standbys:
    def __init__(self, log: RunLog, members: Members, *, own_log_id: str) -> None:
        self._log = log
        self._members = members
        self._own_log_id = own_log_id
        self.connected: dict[str, Follower] = {}
        """By log id; for display. Soft state."""

    def register(self, standby: StandbyRegistered) -> None:
        """Durably, unless it is known at these addresses. Raises `StorageError`."""
        known = self._log.state.standbys.get(standby.log_id)
        places = (standby.admission, standby.session)
        if known is not None and (known.admission, known.session) == places:
            return
        self._log.record(standby)
        self._log.say("standby", f"a standby coordinator at {standby.session} is ready")
        for session in self._members.sessions.values():
            self.tell(session)

    def tell(self, session: Session) -> None:
        """Where else the run may be found. Nothing while no standby was ever registered."""
        if self._log.state.is_alone:
            return
        session.send(
            standbys=coordinator_pb2.Standbys(
                standbys=[
                    coordinator_pb2.Standby(admission=s.admission, session=s.session)
                    for s in self._log.state.standbys.values()
                    if s.log_id != self._own_log_id
                ]
            )
        )
