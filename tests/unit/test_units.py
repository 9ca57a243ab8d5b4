# SPDX-License-Identifier: Apache-2.0
"""Numbers for people."""

from shoal.units import human_bytes, human_count, human_seconds


def test_units_read_well() -> None:
    assert [human_bytes(n) for n in (0, 999, 1500, 16_780_000, 3.98e9, 5e15)] == [
        "0 B", "999 B", "1.50 kB", "16.8 MB", "3.98 GB", "5000 TB",
    ]  # fmt: skip
    assert [human_count(n) for n in (8192, 65_536, 6_520_000, 7e9)] == [
        "8,192", "65.5 k", "6.52 M", "7 B",
    ]  # fmt: skip
    assert [human_seconds(s) for s in (-1, 59.6, 252, 7260, 90_000)] == [
        "0 s", "1 min 0 s", "4 min 12 s", "2 h 1 min", "1 d 1 h",
    ]  # fmt: skip
