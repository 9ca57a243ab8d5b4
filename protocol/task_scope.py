# SPDX-License-Identifier: Apache-2.0
"""Background tasks that end with their owner, and whose errors end it."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


class TaskScope:
    """`async with TaskScope() as tasks:` cancels at its end what `tasks.spawn` started.

    An error in a task cancels the body and comes out of the `async with` as itself; that is what
    distinguishes this from `asyncio.TaskGroup`, which wraps it in a group and waits for tasks
    that never end by themselves.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None
        self._owner: asyncio.Task[Any] | None = None

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def __aenter__(self) -> Self:
        self._owner = asyncio.current_task()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        owner, self._owner = self._owner, None
        failure = self._failure
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if failure is None:
            return
        assert owner is not None
        # The cancellation was ours, unless somebody else asked for one too.
        if owner.uncancel() == 0 and (kind is None or kind is asyncio.CancelledError):
            raise failure

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        if self._failure is None and self._owner is not None:
            self._failure = task.exception()
            self._owner.cancel()
