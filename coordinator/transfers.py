# SPDX-License-Identifier: Apache-2.0
"""State on its way between nodes, and what donors must therefore keep pinned. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from shoal.protocol.ids import Incarnation
from shoal.protocol.proto import coordinator_pb2, types_pb2

MAX_DONORS = 4
"""Of one transfer."""

Part: TypeAlias = types_pb2.StatePart.ValueType


@dataclass(frozen=True, slots=True)
class Version:
    """A part of a stage's state after `step` committed steps."""

    step: int
    part: Part


@dataclass(frozen=True, slots=True)
class Transfer:
    version: Version
    donors: tuple[Incarnation, ...]
    urgent: bool = False
    """The run waits for it."""


def pins(transfers: Iterable[Transfer]) -> dict[Incarnation, dict[Version, bool]]:
    """By donor, what it must serve, and whether somebody waits for that."""
    found: dict[Incarnation, dict[Version, bool]] = {}
    for transfer in transfers:
        for donor in transfer.donors:
            wanted = found.setdefault(donor, {})
            wanted[transfer.version] = wanted.get(transfer.version, False) or transfer.urgent
    return found


def to_pin(wanted: dict[Version, bool]) -> coordinator_pb2.Pin:
    return coordinator_pb2.Pin(
        versions=[
            coordinator_pb2.StateVersion(step=v.step, part=v.part, urgent=urgent)
            for v, urgent in wanted.items()
        ]
    )
