# SPDX-License-Identifier: Apache-2.0
"""One tiny swarm, 2 stages × 2 replicas, lives through every fault at every moment.

Each case orders its faults, waits until they have happened and the swarm is whole again, and
judges the steps made since: the bits of the undisturbed run, every microbatch once, no step lost.
Between cases the run is paused.
"""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from shoal.protocol.faults import Action, Fault, FiredFault

from .fault_cases import DEFAULT_PAIRS, NUM_PAIRS, Case, Strike, one_a_moment, pair, singles
from .fault_verdict import aftermath, check_since, report
from .harness import ENDLESS, spec
from .supervision import COORDINATOR, SupervisedSwarm

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

NODES = ("n0", "n1", "n2", "n3")

_STEPS_AHEAD = 2
"""A fault is due so many steps after it was ordered: it has been read by then."""
_STEPS_AFTER = 2
_MISSED_AFTER = 8
"""A moment that hasn't come for so many steps belongs to a stage that the node holds no more."""


class Arena:
    """The swarm that the cases share. A case that fails leaves it to nobody."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._stack = AsyncExitStack()
        self._swarm: SupervisedSwarm | None = None
        self._num_faults = 0

    async def swarm(self) -> SupervisedSwarm:
        if self._swarm is None:
            run = spec(name="faults", steps=ENDLESS, fault={"snapshot_every": 10})
            swarm = SupervisedSwarm(self._factory.mktemp("faults"), run)
            self._swarm = await self._stack.enter_async_context(swarm)
            await swarm.start(*NODES)
            await swarm.pause()
        return self._swarm

    def next_id(self) -> str:
        self._num_faults += 1
        return str(self._num_faults)

    async def give_up(self, error: BaseException) -> None:
        self._swarm = None
        await self._stack.__aexit__(type(error), error, error.__traceback__)

    async def close(self) -> None:
        async with self._stack:
            if self._swarm is not None:
                await self._swarm.stop_and_check()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arena(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Arena]:
    made = Arena(tmp_path_factory)
    yield made
    await made.close()


async def survives(arena: Arena, case: Case) -> None:
    try:
        swarm = await arena.swarm()
        await _survives(arena, swarm, case)
    except BaseException as error:
        await arena.give_up(error)
        raise


async def _survives(arena: Arena, swarm: SupervisedSwarm, case: Case) -> None:
    names = await names_of(swarm, case)
    first_event = len(swarm.log())
    told = swarm.newest(COORDINATOR).log.stat().st_size
    swarm.left.clear()
    ordered: dict[str, tuple[str, Strike]] = {}
    step = swarm.last_step + _STEPS_AHEAD
    for name, strike in zip(names, case.strikes, strict=True):
        id = arena.next_id()
        ordered[id] = name, strike
        swarm.order(name, fault(id, step, strike))

    await swarm.resume()
    fired = await have_fired(swarm, ordered, step)
    await swarm.committed(max(f.step for f in fired) + _STEPS_AFTER)
    lasts_until_s = max(f.time_s + ordered[f.id][1].seconds for f in fired)
    await swarm.wait_until(lambda: time.time() > lasts_until_s, "the faults are over")
    # At rest: every step that is made must be made once more, to compare.
    await swarm.pause()
    await swarm.is_whole(NODES, replicas=2)

    check_since(swarm, first_event)
    let_go = {f.pid for f in fired if f.action is Action.TERM}
    if swarm_was_let_go(swarm, let_go):
        let_go |= {p.pid for p in swarm.left}
    assert {p.pid for p in swarm.left} <= let_go, "a node left that nobody had asked to"
    with swarm.newest(COORDINATOR).log.open("rb") as file:
        file.seek(told)
        new_log = file.read().decode(errors="replace")
    report(aftermath(case, fired, swarm.log(), first_event, new_log))


async def names_of(swarm: SupervisedSwarm, case: Case) -> list[str]:
    """Who stands where the strikes hit, in this moment."""
    view = await swarm.view()
    return [
        COORDINATOR
        if s.target == COORDINATOR
        else sorted(swarm.process_of(node).name for node in view.stages[s.target[0]].nodes)[
            s.target[1]
        ]
        for s in case.strikes
    ]


def fault(id: str, step: int, strike: Strike) -> Fault:
    return Fault(
        id=id,
        step=step + strike.later,
        moment=strike.moment,
        action=strike.action,
        seconds=strike.seconds,
        delay_s=strike.delay_s,
        skip=strike.skip,
    )


async def have_fired(
    swarm: SupervisedSwarm, ordered: dict[str, tuple[str, Strike]], step: int
) -> list[FiredFault]:
    """Those of the ordered faults that have happened, once all have; or once it is plain that the
    others won't, since their node got another stage meanwhile. Oldest first."""
    names = {name for name, _ in ordered.values()}

    def fired() -> list[FiredFault]:
        found = (f for name in names for f in swarm.fired(name) if f.id in ordered)
        return sorted(found, key=lambda f: f.time_s)

    await swarm.wait_until(
        lambda: (
            len(fired()) == len(ordered)
            or (bool(fired()) and swarm.last_step >= step + _MISSED_AFTER)
        ),
        "the faults have happened",
    )
    happened = fired()
    for name in {ordered[id][0] for id in ordered.keys() - {f.id for f in happened}}:
        swarm.cancel(name)
    return happened


def swarm_was_let_go(swarm: SupervisedSwarm, let_go: set[int]) -> bool:
    return any(p.name == COORDINATOR and p.pid in let_go for p in swarm.processes)


SINGLES = singles()
DEFAULT_SINGLES = one_a_moment(SINGLES)


@pytest.mark.parametrize("case", DEFAULT_SINGLES, ids=lambda case: case.id)
async def test_a_fault_at_each_moment_changes_nothing(arena: Arena, case: Case) -> None:
    await survives(arena, case)


@pytest.mark.parametrize("seed", DEFAULT_PAIRS)
async def test_a_pair_of_faults_changes_nothing(arena: Arena, seed: int) -> None:
    await survives(arena, pair(seed))


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [case for case in SINGLES if case not in DEFAULT_SINGLES], ids=lambda case: case.id
)
async def test_every_fault_at_every_moment_changes_nothing(arena: Arena, case: Case) -> None:
    await survives(arena, case)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(DEFAULT_PAIRS.stop, NUM_PAIRS))
async def test_any_pair_of_faults_changes_nothing(arena: Arena, seed: int) -> None:
    await survives(arena, pair(seed))
