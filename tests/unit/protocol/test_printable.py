# SPDX-License-Identifier: Apache-2.0
"""What a peer wrote can't steer a terminal."""

from shoal.protocol.printable import printable


def test_control_characters_are_replaced() -> None:
    assert printable("a\x1b[2J\rb\n") == "a?[2J?b?"
    assert printable("a\x1b[2J\rb", instead=" ") == "a [2J b"


def test_what_is_harmless_stays() -> None:
    assert printable("Überraschung – 12 %\n", kept="\n") == "Überraschung – 12 %\n"
