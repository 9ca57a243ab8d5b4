# SPDX-License-Identifier: Apache-2.0
"""Random orders of events, for tests of what no order may change."""

from collections.abc import Callable, Sequence

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

Script = list[tuple[int, int]]
"""(kind of event, choice among those that can happen: below 65,536)."""

ORDER, TIME, DISTURB = range(3)

_EVENT_BYTES = 3
_CASES_A_PART = 500

PARTS = range(10)
"""Of a test of thousands of cases, each a test id with a seed of its own: a run on a slow machine
loses no more than one of them to a time limit, and whatever fails fails again."""


def scripts(kinds: Sequence[int], *, least: int = 0, most: int) -> st.SearchStrategy[Script]:
    """Of `least` to `most` events. Drawn as one string of bytes, ten times as fast as a list of
    pairs, and shrunk no worse."""

    def read(drawn: bytes) -> Script:
        events = range(0, len(drawn) - _EVENT_BYTES + 1, _EVENT_BYTES)
        return [(kinds[drawn[i] % len(kinds)], drawn[i + 1] | drawn[i + 2] << 8) for i in events]

    return st.binary(min_size=_EVENT_BYTES * least, max_size=_EVENT_BYTES * most).map(read)


def run_part(
    part: int,
    run_case: Callable[..., object],
    *,
    cases: int = _CASES_A_PART,
    **arguments: st.SearchStrategy[object],
) -> None:
    """Some hundred cases, the same ones each time."""

    @seed(part)
    @settings(max_examples=cases, deadline=None, suppress_health_check=list(HealthCheck))
    @given(**arguments)
    def run(**drawn: object) -> None:
        run_case(**drawn)

    run()
