# SPDX-License-Identifier: Apache-2.0
"""Which versions joiners warm up with: remembered over a joiner's restart, shared by many. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.coordinator.sessions import Session
from shoal.coordinator.transfers import Transfer
from shoal.protocol.ids import PeerId, Stage

LINGER_S = 60.0
"""How long a version stays pinned for a joiner that is gone, to go on when it comes back."""

MAX_VERSIONS = 3
"""Of a stage, pinned for joiners; more joiners share the newest."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    stage: Stage
    transfer: Transfer
    seen_s: float
    """When the joiner was last at it."""


def kept(
    warm_ups: Mapping[PeerId, WarmUp], sessions: Mapping[PeerId, Session], now_s: float
) -> dict[PeerId, WarmUp]:
    """Without those of joiners that have their weights, do something else, or don't come back."""

    def stays(peer_id: PeerId, warm_up: WarmUp) -> bool:
        session = sessions.get(peer_id)
        if session is None or session.state == "attached":
            return now_s - warm_up.seen_s < LINGER_S
        return session.state == "warming" and not session.is_warm

    return {peer_id: w for peer_id, w in warm_ups.items() if stays(peer_id, w)}


def chosen(warm_ups: Mapping[PeerId, WarmUp], peer_id: PeerId, stage: Stage) -> Transfer | None:
    """The version to warm up with, when it isn't the run's step."""
    own = warm_ups.get(peer_id)
    if own is not None and own.stage == stage:
        return own.transfer
    others = {w.transfer.version: w.transfer for w in warm_ups.values() if w.stage == stage}
    if len(others) < MAX_VERSIONS:
        return None
    return others[max(others, key=lambda version: version.step)]
