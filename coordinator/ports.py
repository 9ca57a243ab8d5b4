# SPDX-License-Identifier: Apache-2.0
"""The two gRPC ports of a coordinator: which ones it tries, and how a standby keeps them free."""

import contextlib
import os
import socket
from collections.abc import Sequence

from shoal.coordinator.run_folder import Live
from shoal.protocol.errors import CapacityError
from shoal.protocol.ids import RunId
from shoal.protocol.join_link import join_address
from shoal.protocol.proto import coordinator_pb2


def wanted_ports(port: int, previous: Live | None) -> list[tuple[int, int]]:
    """(admission, session) in the order in which to try them: those asked for, else those of last
    time, else any (0)."""
    asked = (port, port + 1 if port else 0)
    if port or previous is None:
        return [asked]
    return [(_port(previous.admission), _port(previous.session)), asked]


class ReservedPorts:
    """The two ports that a standby will open: bound, so that nobody else takes them, and not
    listening, so that nodes which ask there in vain go on at once."""

    def __init__(self, host: str, advertised: str, wanted: Sequence[tuple[int, int]]) -> None:
        """Raises `CapacityError` when none of the wanted pairs is free."""
        self._host = host
        self._advertised = advertised
        self._sockets: list[socket.socket] = []
        for ports in wanted[:-1]:
            with contextlib.suppress(CapacityError):
                self._numbers = self._bind(ports)
                return
        self._numbers = self._bind(wanted[-1])

    def addresses(self) -> coordinator_pb2.Standby:
        admission, session = (join_address(self._advertised, n) for n in self._numbers)
        return coordinator_pb2.Standby(admission=admission, session=session)

    def as_live(self, run_id: RunId) -> Live:
        """As if a coordinator had been there: the next one takes its ports."""
        at = self.addresses()
        return Live(
            run_id=run_id, pid=os.getpid(), dashboard="", admission=at.admission,
            session=at.session, link="",
        )  # fmt: skip

    def reserve(self) -> None:
        """Again, after a takeover that came to nothing. Whoever has got them keeps them."""
        try:
            self._numbers = self._bind(self._numbers)
        except CapacityError:
            self._numbers = self._bind((0, 0))

    def release(self) -> None:
        sockets, self._sockets = self._sockets, []
        for bound in sockets:
            bound.close()

    def _bind(self, wanted: Sequence[int]) -> tuple[int, int]:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        bound: list[socket.socket] = []
        try:
            for port in wanted:
                bound.append(socket.socket(family, socket.SOCK_STREAM))
                bound[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound[-1].bind((self._host, port))
        except OSError as error:
            for one in bound:
                one.close()
            raise CapacityError(
                f"can't reserve port {port} on {self._host}: {error.strerror or error}; stop the "
                "other program, or choose another --port (sessions take the next one)"
            ) from None
        self._sockets = bound
        first, second = (one.getsockname()[1] for one in bound)
        return first, second


def _port(address: str) -> int:
    tail = address.rpartition(":")[2]
    return int(tail) if tail.isdecimal() else 0
