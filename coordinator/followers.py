# SPDX-License-Identifier: Apache-2.0
"""Standbys that are connected now, for display. Soft state."""

from dataclasses import dataclass


@dataclass(slots=True)
class Follower:
    address: str
    sequence: int = 0
    """The newest event that was sent to it."""
    snapshots: tuple[int, ...] = ()
    """Steps of the complete snapshots that it had when it connected."""
