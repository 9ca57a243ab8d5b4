# SPDX-License-Identifier: Apache-2.0
"""Nodes of another release: with the same protocol they take part, with another they never get
a certificate."""

from pathlib import Path

import pytest

from shoal.protocol.errors import VersionError
from shoal.version import PROTOCOL_VERSION, __version__

from .harness import Swarm, spec

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]


async def test_a_node_of_another_release_and_the_same_protocol_takes_part(tmp_path: Path) -> None:
    async with Swarm(tmp_path, spec(steps=6, pipeline={"replicas": 1})) as swarm:
        swarm.start_coordinator()
        newer = swarm.start_node("n1", version="v.__version__ = '9.8.7'")
        await swarm.started([swarm.start_node("n0"), newer])
        await swarm.finished()
        told = swarm.coordinator.log.read_text(encoding="utf-8")
        assert f"release '9.8.7', this is {__version__}" in told
        swarm.check_exact()


async def test_a_node_of_another_protocol_is_refused_before_it_joins(tmp_path: Path) -> None:
    async with Swarm(tmp_path, spec(pipeline={"replicas": 1})) as swarm:
        coordinator = swarm.start_coordinator()
        newer = f"v.PROTOCOL_VERSION = {PROTOCOL_VERSION + 1}; v.__version__ = '9.8.7'"
        node = swarm.start_node("n0", version=newer)
        node.was_signalled = True  # its end is no crash
        assert await swarm.ended(node) == VersionError.exit_code
        said = node.log.read_text(encoding="utf-8")
        assert f"protocol version {PROTOCOL_VERSION} (shoal {__version__})" in said
        assert f"version {PROTOCOL_VERSION + 1} (shoal '9.8.7')" in said
        assert f"pip install 'shoal=={__version__}'" in said
        assert "Traceback" not in said
        assert not (await swarm.view()).nodes
        assert "admitted" not in coordinator.log.read_text(encoding="utf-8")
