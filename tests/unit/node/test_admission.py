# SPDX-License-Identifier: Apache-2.0
"""What a node takes from an admission's reply."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.node.admission import _membership
from shoal.protocol.errors import ConfigError, VersionError
from shoal.protocol.proto import coordinator_pb2
from shoal.version import RUN_SPEC_VERSION


def read(run_spec: object) -> None:
    nobody: Any = SimpleNamespace()
    reply = coordinator_pb2.JoinReply(run_spec=json.dumps(run_spec).encode())
    _membership(reply, nobody, nobody, nobody)


@pytest.mark.parametrize("run", [{"spec": {"version": RUN_SPEC_VERSION + 1}}, {}, [], {"spec": 3}])
def test_a_run_spec_of_another_version_names_the_remedy(run: object) -> None:
    with pytest.raises(VersionError, match="install the coordinator's release"):
        read(run)


def test_a_run_spec_of_this_version_is_read_and_checked() -> None:
    with pytest.raises(ConfigError, match="run_id"):
        read({"spec": {"version": RUN_SPEC_VERSION}})
