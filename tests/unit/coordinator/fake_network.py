# SPDX-License-Identifier: Apache-2.0
"""What passes between fake nodes: boundary tensors and sums, lost with their sender, so that a step
can hang as a real one would."""

from collections.abc import Iterable
from typing import NamedTuple


class Message(NamedTuple):
    step: int
    attempt: int
    kind: str
    number: int
    """The microbatch, or the round of a reduction."""
    value: int
    sender: int
    """Incarnation."""
    receiver: int
    """Incarnation."""


def oldest_of_each_channel(messages: Iterable[Message]) -> list[Message]:
    """Between two nodes messages keep their order."""
    channels: dict[tuple[int, int], Message] = {}
    for message in messages:
        channels.setdefault((message.sender, message.receiver), message)
    return list(channels.values())
