# SPDX-License-Identifier: Apache-2.0
"""Pinned versions: of the step at which they were asked for, bounded, gone when superseded."""

import asyncio
from pathlib import Path

import pytest

from shoal.node import state_pins
from shoal.node.state_pins import MAX_PINS, StatePins
from shoal.protocol.errors import StorageError, WrongStepError
from shoal.protocol.proto import coordinator_pb2, types_pb2

WEIGHTS = types_pb2.STATE_PART_WEIGHTS
MOMENTS = types_pb2.STATE_PART_MOMENTS


class Holder:
    """A state that moves on as soon as a save is queued."""

    def __init__(self, folder: Path) -> None:
        self.step = 5
        self.fails = False
        self.pins = StatePins(folder, step=lambda: self.step, save=self.save)

    async def save(self, path: Path, part: state_pins.Part) -> tuple[int, int]:
        step = self.step
        await asyncio.sleep(0)
        if self.fails:
            raise StorageError("the disk is full")
        path.write_bytes(f"state {step} part {part}".encode())
        return step, 77

    async def want(self, *versions: tuple[int, state_pins.Part]) -> None:
        await self.pins.want(
            coordinator_pb2.Pin(
                versions=[coordinator_pb2.StateVersion(step=s, part=p) for s, p in versions]
            )
        )


async def test_a_pinned_version_stays_while_training_goes_on(tmp_path: Path) -> None:
    holder = Holder(tmp_path)
    await holder.want((5, WEIGHTS))
    holder.step = 6  # queued before: the copy is of step 5
    pinned = await holder.pins.get(5, WEIGHTS)
    assert pinned.path.read_bytes() == f"state 5 part {WEIGHTS}".encode()
    assert pinned.description.weights_digest == 77
    await holder.pins.close()
    assert list(tmp_path.iterdir()) == []


async def test_versions_that_are_not_listed_any_more_go(tmp_path: Path) -> None:
    holder = Holder(tmp_path)
    await holder.want((5, WEIGHTS), (5, MOMENTS))
    await holder.pins.get(5, WEIGHTS)
    await holder.pins.get(5, MOMENTS)
    holder.step = 6
    await holder.want((5, MOMENTS), (6, WEIGHTS))
    assert set(holder.pins.versions) == {(5, MOMENTS), (6, WEIGHTS)}
    await holder.pins.get(6, WEIGHTS)
    assert len(list(tmp_path.iterdir())) == 2
    await holder.want()
    await asyncio.sleep(0)
    assert list(tmp_path.iterdir()) == []


async def test_a_version_of_another_step_is_not_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_pins, "PIN_LAG_S", 0.0)
    holder = Holder(tmp_path)
    await holder.want((4, WEIGHTS), (6, WEIGHTS), (5, 99))  # type: ignore[arg-type]
    assert holder.pins.versions == []
    with pytest.raises(WrongStepError, match="not pinned"):
        await holder.pins.get(4, WEIGHTS)


async def test_a_joiner_may_ask_before_the_pin_arrives(tmp_path: Path) -> None:
    holder = Holder(tmp_path)
    asking = asyncio.create_task(holder.pins.get(5, WEIGHTS))
    await asyncio.sleep(0)
    await holder.want((5, WEIGHTS))
    assert (await asking).path.exists()
    await holder.pins.close()


async def test_pins_are_bounded(tmp_path: Path) -> None:
    holder = Holder(tmp_path)
    steps = range(5, 5 + MAX_PINS + 2)
    for step in steps:
        holder.step = step
        await holder.want(*[(s, WEIGHTS) for s in steps if s <= step])
    assert len(holder.pins.versions) == MAX_PINS
    await holder.pins.close()


async def test_a_full_disk_costs_the_joiner_a_donor_and_no_more(tmp_path: Path) -> None:
    holder = Holder(tmp_path)
    holder.fails = True
    await holder.want((5, WEIGHTS))
    with pytest.raises(StorageError):
        await holder.pins.get(5, WEIGHTS)
    await holder.pins.close()


async def test_a_version_is_not_kept_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_pins, "MAX_AGE_S", 0.0)
    holder = Holder(tmp_path)
    await holder.want((5, WEIGHTS))
    while holder.pins.versions:  # noqa: ASYNC110  # the loop's next turn
        await asyncio.sleep(0)
    await holder.pins.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_version_for_which_the_run_waits_later_is_urgent_then(tmp_path: Path) -> None:
    holder = Holder(tmp_path)
    await holder.want((5, WEIGHTS))
    assert not (await holder.pins.get(5, WEIGHTS)).urgent
    version = coordinator_pb2.StateVersion(step=5, part=WEIGHTS, urgent=True)
    await holder.pins.want(coordinator_pb2.Pin(versions=[version]))
    assert (await holder.pins.get(5, WEIGHTS)).urgent
    await holder.pins.close()
