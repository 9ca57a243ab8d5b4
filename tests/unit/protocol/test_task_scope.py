# SPDX-License-Identifier: Apache-2.0
"""Background tasks end with their owner, and their errors end it."""

import asyncio

import pytest

from shoal.protocol.task_scope import TaskScope


async def test_an_error_in_a_task_ends_the_owner_as_itself() -> None:
    async def fails() -> None:
        raise LookupError("lost")

    async def owner() -> None:
        async with TaskScope() as tasks:
            tasks.spawn(fails())
            await asyncio.Event().wait()

    with pytest.raises(LookupError, match="lost"):
        await owner()
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_tasks_end_with_their_owner() -> None:
    async with TaskScope() as tasks:
        forever = tasks.spawn(asyncio.Event().wait())
        await asyncio.sleep(0)
    assert forever.cancelled()


async def test_an_error_of_the_body_comes_first() -> None:
    async def owner() -> None:
        async with TaskScope() as tasks:
            tasks.spawn(asyncio.Event().wait())
            raise KeyError

    with pytest.raises(KeyError):
        await owner()


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def body() -> None:
        async with TaskScope() as tasks:
            tasks.spawn(asyncio.Event().wait())
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
