# SPDX-License-Identifier: Apache-2.0
"""Identifiers. `NewType`s, so that mypy tells a peer id from a run id."""

import hashlib
from typing import NewType

PeerId = NewType("PeerId", str)
"""26 lower-case base32 characters: the first 16 bytes of SHA-256 over an Ed25519 public key."""

RunId = NewType("RunId", str)
"""The run's name, a dash and 8 hex digits."""

Incarnation = NewType("Incarnation", int)
"""One assignment of one node. Counted up over the run, never reused; 0 means nobody."""

Stage = NewType("Stage", int)
Step = NewType("Step", int)
"""Optimizer steps, from 1. "State at step t" means after t committed steps."""

MicrobatchId = NewType("MicrobatchId", int)
"""Within a step, from 0."""

NOBODY = Incarnation(0)

_ADJECTIVES = (
    "amber", "azure", "brisk", "calm", "cedar", "clear", "coral", "crisp",
    "dawn", "deep", "dusky", "eager", "early", "fern", "fleet", "frost",
    "gentle", "gold", "hazel", "ivory", "jade", "keen", "lilac", "lunar",
    "maple", "mellow", "misty", "noble", "north", "olive", "opal", "pale",
    "pearl", "plum", "quick", "quiet", "rapid", "rose", "ruby", "rust",
    "sage", "sandy", "silver", "slate", "snowy", "solar", "still", "stone",
    "sunny", "swift", "teal", "tidal", "topaz", "umber", "velvet", "vivid",
    "warm", "west", "wild", "willow", "windy", "winter", "wise", "young",
)  # fmt: skip
_ANIMALS = (
    "badger", "bear", "beaver", "bison", "crane", "crow", "deer", "dove",
    "eagle", "eel", "egret", "elk", "falcon", "finch", "fox", "gecko",
    "goose", "gull", "hare", "hawk", "heron", "ibex", "ibis", "jay",
    "kite", "koala", "lark", "lemur", "lion", "lynx", "marten", "mink",
    "mole", "moose", "moth", "newt", "orca", "otter", "owl", "panda",
    "perch", "pike", "puffin", "quail", "raven", "robin", "salmon", "seal",
    "shark", "shrew", "sparrow", "squid", "stork", "swan", "tern", "tiger",
    "toad", "trout", "turtle", "viper", "vole", "whale", "wolf", "wren",
)  # fmt: skip


def display_name(peer_id: PeerId) -> str:
    """Two words for humans, such as "amber-fox". Not unique; never used as a key."""
    digest = hashlib.sha256(peer_id.encode()).digest()
    return f"{_ADJECTIVES[digest[0] % 64]}-{_ANIMALS[digest[1] % 64]}"
