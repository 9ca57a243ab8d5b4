# SPDX-License-Identifier: Apache-2.0
"""Names for humans."""

import re

from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol import ids
from shoal.protocol.ids import PeerId, display_name


@given(st.text(max_size=40))
def test_display_name_is_two_plain_words_and_always_the_same(peer_id: str) -> None:
    name = display_name(PeerId(peer_id))
    assert re.fullmatch(r"[a-z]+-[a-z]+", name)
    assert display_name(PeerId(peer_id)) == name


def test_every_word_can_come_up_and_comes_once() -> None:
    for words in (ids._ADJECTIVES, ids._ANIMALS):
        assert len(words) == len(set(words)) == 64


def test_display_names_spread_over_peers() -> None:
    names = {display_name(PeerId(f"peer{i}")) for i in range(200)}
    assert len(names) > 180


def test_display_name_is_part_of_the_protocol_and_never_changes() -> None:
    # Coordinator and nodes name the same peer in their logs, whatever their releases.
    assert display_name(PeerId("eh7ddx5bksrgcytl7bkai36se4")) == "sandy-badger"
