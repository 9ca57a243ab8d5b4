# SPDX-License-Identifier: Apache-2.0
"""The release, and the versions of everything that outlives a process."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 3
"""Peers and coordinator must agree on it exactly; compared at the handshake."""

RUN_SPEC_VERSION = 1
SNAPSHOT_VERSION = 1
EVENT_LOG_VERSION = 2
