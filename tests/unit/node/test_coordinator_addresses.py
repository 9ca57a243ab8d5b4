# SPDX-License-Identifier: Apache-2.0
"""Where a node asks next: where it was led last, then everywhere else in turn."""

from shoal.node.coordinator_addresses import MAX_ADDRESSES, CoordinatorAddresses


def asked(addresses: CoordinatorAddresses, times: int) -> list[str]:
    found = []
    for _ in range(times):
        found.append(addresses.current)
        addresses.failed()
    return found


def test_all_are_asked_in_turn() -> None:
    addresses = CoordinatorAddresses("a")
    addresses.learn(["b", "c"])
    assert asked(addresses, 4) == ["a", "b", "c", "a"]


def test_whoever_led_last_is_the_first_to_be_asked_again() -> None:
    addresses = CoordinatorAddresses("a")
    addresses.learn(["b", "c"])
    asked(addresses, 2)
    addresses.answered()
    assert asked(addresses, 3) == ["c", "a", "b"]


def test_what_was_found_last_comes_before_what_is_known_longer() -> None:
    addresses = CoordinatorAddresses("a")
    addresses.learn(["b"])
    addresses.learn(["c", "a"])
    assert asked(addresses, 3) == ["a", "c", "b"]


def test_no_more_are_kept_than_the_bound() -> None:
    addresses = CoordinatorAddresses("a")
    addresses.learn(f"{n}" for n in range(100))
    assert len(set(asked(addresses, 200))) == MAX_ADDRESSES
    addresses.learn(["new"])
    assert "new" in asked(addresses, MAX_ADDRESSES)
