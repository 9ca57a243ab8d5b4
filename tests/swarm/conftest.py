# SPDX-License-Identifier: Apache-2.0
"""One long-lived swarm for the cases that leave it as they found it."""

from collections.abc import AsyncIterator, Generator

import pytest
import pytest_asyncio

from .harness import ENDLESS, Swarm, spec


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def long_lived(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Swarm]:
    """Nodes "n0" to "n3" on two stages, training without end. Exact to its last step, or the
    session fails."""
    folder = tmp_path_factory.mktemp("shared")
    async with Swarm(folder, spec(name="shared", steps=ENDLESS)) as swarm:
        await swarm.start("n0", "n1", "n2", "n3")
        await swarm.pause()
        yield swarm
        await swarm.stop_and_check()


@pytest_asyncio.fixture
async def shared(long_lived: Swarm) -> AsyncIterator[Swarm]:
    """The long-lived swarm, paused before and after: every step that it makes must be made once
    more, to compare."""
    yield long_lived
    await long_lived.pause()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Failures of a case on the shared swarm show the swarm's logs."""
    report = yield
    swarm = getattr(item, "funcargs", {}).get("shared")
    if report.failed and isinstance(swarm, Swarm):
        report.sections.append(("logs of the shared swarm", swarm.logs()))
    return report
