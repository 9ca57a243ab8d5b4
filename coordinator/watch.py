# SPDX-License-Identifier: Apache-2.0
"""Watches over the open step: who owes something, since when, and whom it takes too long."""

from collections import Counter, deque
from collections.abc import Sequence

from shoal.coordinator.ledger import StepLedger
from shoal.coordinator.members import Members
from shoal.coordinator.mute import LEAST_S, WARM_UP_S, Debtor, patience_s
from shoal.coordinator.sessions import Session
from shoal.protocol.deadlines import FEW, adaptive_s
from shoal.protocol.ids import Incarnation

STALL_S = 10.0
"""While nothing is known, a step without progress for so long says whom it waits for."""

_LEAST_STALL_S = 5.0
_MOST_STALL_S = 120.0
_KEPT = 64


class StepWatch:
    """Soft observations; they may begin anew at any time."""

    def __init__(self, now_s: float) -> None:
        self._progress_s = now_s
        self._asked_s = now_s
        self._gaps: deque[float] = deque(maxlen=_KEPT)
        self._sums: deque[float] = deque(maxlen=_KEPT)
        self._applies: deque[float] = deque(maxlen=_KEPT)

    # ---- what is seen --------------------------------------------------------------------

    def opened(self, now_s: float) -> None:
        """A step opens: the time since the last one says nothing."""
        self._progress_s = now_s

    def progressed(self, now_s: float) -> None:
        self._gaps.append(now_s - self._progress_s)
        self._progress_s = now_s

    def summed(self, session: Session, now_s: float) -> None:
        """A node has prepared its stage's sums."""
        self._sums.append(now_s - session.asked_s)

    def applied(self, session: Session, now_s: float) -> None:
        self._applies.append(now_s - session.asked_s)

    # ---- what follows --------------------------------------------------------------------

    def stall_s(self) -> float:
        return adaptive_s(
            self._gaps,
            least_s=_LEAST_STALL_S,
            most_s=_MOST_STALL_S,
            unknown_s=STALL_S,
            medians=10.0,
        )

    def stalls(self, now_s: float) -> bool:
        return now_s - self._progress_s > self.stall_s()

    def computing(self, ledger: StepLedger, members: Members) -> list[Debtor]:
        """Who owes receipts or sums."""
        owed: Counter[Incarnation] = Counter(ledger.holder(*slot) for slot in ledger.missing())
        owed.update(dict.fromkeys(ledger.unprepared(), 0))
        debtors, asked = [], deque(owed)
        while asked:
            who = asked.popleft()
            session = members.by_incarnation(who)
            if session is None or session.stage is None or not ledger.participates(who):
                continue
            tasks = owed[who]
            busy = self._busy(session, members) if tasks else self._sums
            least_s = LEAST_S if session.pace or not tasks else WARM_UP_S
            patience = patience_s(busy, tasks, times=session.mutes, least_s=least_s)
            debtor = _debtor(session, patience)
            debtors.append(debtor)
            # Whom it waits for may owe it something that has no receipt.
            if debtor.waits_for not in owed:
                owed[debtor.waits_for] = 1
                asked.append(debtor.waits_for)
        return debtors

    def applying(self, late: Sequence[Session]) -> list[Debtor]:
        return [_debtor(s, patience_s(self._applies, 1)) for s in late]

    def _busy(self, session: Session, members: Members) -> Sequence[float]:
        """Seconds per microbatch: its own, else its stage's, else anybody's."""
        if session.pace:
            return list(session.pace) * FEW
        sessions = members.sessions.values()
        seen = [b for s in sessions if s.stage == session.stage for b in s.pace]
        return seen if len(seen) >= FEW else [b for s in sessions for b in s.pace]


def _debtor(session: Session, patience_s: float) -> Debtor:
    assert session.stage is not None, "it takes part"
    return Debtor(
        incarnation=session.incarnation,
        stage=session.stage,
        waits_for=Incarnation(session.heartbeat.progress.waits_for),
        still_s=session.still_s,
        patience_s=patience_s,
    )
