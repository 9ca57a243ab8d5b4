# SPDX-License-Identifier: Apache-2.0
"""Faults on order: what shall go wrong, when, and which of it is due. Pure.

For tests and for `shoal demo --chaos`. `fault_injector.py` carries them out.
"""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.protocol.errors import ConfigError

MAX_SECONDS = 3600.0


class Moment(StrEnum):
    """A point that a process reaches in a step."""

    # Of a node.
    FORWARD_RECEIVED = "forward_received"
    """An activation from upstream is in the step's work, and not acknowledged yet."""
    FORWARD_SENT = "forward_sent"
    """Downstream has acknowledged an activation."""
    BACKWARD_RECEIVED = "backward_received"
    """As `FORWARD_RECEIVED`, of a gradient from downstream."""
    GRADIENT_ACCUMULATED = "gradient_accumulated"
    """A microbatch is in the sums, its receipt not sent."""
    MID_REDUCE = "mid_reduce"
    """A peer has acknowledged the first slice of a round. Where nobody shares the stage: the round
    has begun."""
    PREPARED = "prepared"
    """The coordinator has been told the digest of the sums."""
    COMMITTED = "committed"
    """The commit has arrived, and nothing of it is applied."""

    # Of the coordinator.
    STEP_OPENED = "step_opened"
    """The opening is on disk, nobody has heard of it."""
    RECEIPTS_COMPLETE = "receipts_complete"
    """The step's last receipt is in; the stage that it completes is not told to sum up."""
    COMMIT_WRITTEN = "commit_written"
    """The step's record is on disk, and not announced."""


NODE_MOMENTS = (
    Moment.FORWARD_RECEIVED,
    Moment.FORWARD_SENT,
    Moment.BACKWARD_RECEIVED,
    Moment.GRADIENT_ACCUMULATED,
    Moment.MID_REDUCE,
    Moment.PREPARED,
    Moment.COMMITTED,
)
COORDINATOR_MOMENTS = (Moment.STEP_OPENED, Moment.RECEIPTS_COMPLETE, Moment.COMMIT_WRITTEN)


class Action(StrEnum):
    KILL = "kill"
    """SIGKILL."""
    TERM = "term"
    """SIGTERM: what an owner, or a preempted machine, sends."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after `seconds`."""
    DROP_LINK = "drop_link"
    """For `seconds` nothing passes between this node and `peer`, in either direction."""
    DELAY_LINK = "delay_link"
    """For `seconds` every tensor for `peer` leaves `delay_s` late."""
    FULL_DISK = "full_disk"
    """For `seconds` every write of this process fails with ENOSPC."""
    POISON = "poison"
    """The next gradient computed here holds a NaN."""


LINK_ACTIONS = (Action.DROP_LINK, Action.DELAY_LINK)

_Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]


class Fault(BaseModel):
    """Happens once: at the first time (after `skip` others) that its process reaches `moment` in
    a step >= `step`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, Field(min_length=1, max_length=100)]
    step: Annotated[int, Field(ge=0)]
    moment: Moment
    action: Action
    seconds: _Seconds = 0.0
    """How long it lasts; nothing to a kill, a term and a poison."""
    delay_s: _Seconds = 0.0
    skip: Annotated[int, Field(ge=0)] = 0
    peer: Annotated[str, Field(max_length=200)] = ""
    """The link's other end: a node's name, or how its id begins. Empty: the first neighbour."""


class FiredFault(BaseModel):
    """What was done: a line of the file FILE.fired."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    step: int
    """The one that was under way, >= the fault's own."""
    moment: Moment
    action: Action
    time_s: float
    """Unix time."""
    pid: int


def parse_fault(line: str) -> Fault:
    """Raises `ConfigError` for anything but one fault as JSON."""
    try:
        return Fault.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the line"
        raise ConfigError(
            f"fault {line[:200]!r}: {field}: {first['msg']}; give one JSON object a line, with id, "
            "step, moment and action"
        ) from None


def parse_fired(text: str) -> list[FiredFault]:
    """Lines of FILE.fired. One that a kill cut short was not acted upon, and is left out."""
    fired = []
    for line in text.splitlines():
        try:
            fired.append(FiredFault.model_validate_json(line))
        except ValidationError:
            continue
    return fired


class FaultBook:
    """The faults of one process, and which of them are due."""

    def __init__(self, fired: Iterable[str] = ()) -> None:
        """`fired`: ids that never fire again."""
        self._over = set(fired)
        self._waiting: dict[str, Fault] = {}
        self._reached: Counter[str] = Counter()

    def learn(self, faults: Iterable[Fault]) -> None:
        """Ids that are known already are left as they are."""
        for fault in faults:
            if fault.id not in self._over:
                self._waiting.setdefault(fault.id, fault)

    @property
    def waiting(self) -> list[Fault]:
        return list(self._waiting.values())

    def reach(self, moment: Moment, step: int) -> list[Fault]:
        """The process is at `moment` in `step`: what is due now, in the order learned. It won't
        be due again."""
        due = []
        for fault in self.waiting:
            if fault.moment is not moment or step < fault.step:
                continue
            self._reached[fault.id] += 1
            if self._reached[fault.id] > fault.skip:
                due.append(fault)
        for fault in due:
            del self._waiting[fault.id], self._reached[fault.id]
            self._over.add(fault.id)
        return due
