# SPDX-License-Identifier: Apache-2.0
"""The arithmetic behind the figures of `benchmarks/`."""

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shoal.demo_summary import FaultRecord

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[Any]:
    """Scripts that import each other by name, as when they are run."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import figures  # noqa: F401 - found by the path above
        import goodput  # noqa: F401
        import process_samples  # noqa: F401
        import session  # noqa: F401
        import soak  # noqa: F401

        yield sys.modules
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "__file__", None) == str(BENCHMARKS / f"{name}.py"):
                del sys.modules[name]  # "session" and "figures" are names for others too


def fault(**fields: Any) -> FaultRecord:
    values: dict[str, Any] = {
        "step": 3, "moment": "prepared", "action": "kill", "node": "n", "stage": 1,
        "seconds": 0.0, "at_s": 1.0, "recovered_after_s": 2.0, "others": 1, **fields,
    }  # fmt: skip
    return FaultRecord(**values)


def outcome(benchmarks: Any, **fields: Any) -> Any:
    values = {"every_s": None, "seconds": 10.0, "steps": 20.0, "faults": [], "taken": 160, **fields}
    return benchmarks["session"].Outcome(**values)


def test_goodput_is_steps_over_what_undisturbed_steps_would_have_been(benchmarks: Any) -> None:
    quiet = [outcome(benchmarks), outcome(benchmarks, seconds=30.0, steps=60.0)]
    hit = outcome(benchmarks, every_s=20.0, seconds=40.0, steps=60.0, faults=[fault(), fault()])
    cost = benchmarks["figures"].loss(quiet, [hit])
    assert cost.goodput == pytest.approx(0.75)
    assert cost.lost_s == pytest.approx(5.0)
    assert cost.num_faults == 2


def test_what_is_taken_beyond_the_committed_was_computed_twice(benchmarks: Any) -> None:
    result = benchmarks["session"].Result(pairs_per_step=8)
    result.outcomes = [outcome(benchmarks), outcome(benchmarks, taken=240)]
    assert benchmarks["figures"].computed_twice(result) == pytest.approx(80 / 400)
    assert benchmarks["figures"].computed_twice(benchmarks["session"].Result()) == 0.0


def test_faults_are_told_apart_by_whom_they_hit(benchmarks: Any) -> None:
    kind = benchmarks["figures"].kind
    assert kind(fault()) == "kill, a node of several"
    assert kind(fault(others=0)) == "kill, a stage's only node"
    assert kind(fault(stage=None, others=0)) == "kill, the coordinator"
    assert kind(fault(action="stop", seconds=7.0)) == "stop beyond a lease, a node of several"


def test_table_gives_median_and_worst_in_undisturbed_steps(benchmarks: Any) -> None:
    faults = [fault(recovered_after_s=s) for s in (1.0, 2.0, 6.0)] + [fault(recovered_after_s=None)]
    table = benchmarks["figures"].fault_table(faults, 2.0)
    assert table.splitlines()[2] == "| kill, a node of several | 4 | 3 | 1.0 | 3.0 | 6.0 s |"


def life(
    benchmarks: Any, rss: Any, files: Any = lambda age: 40, ages: range = range(0, 300, 2)
) -> Any:
    samples = benchmarks["process_samples"]
    found = samples.Life("node-1", 7)
    found.samples = [samples.Sample(float(a), int(rss(a)), files(a), 20) for a in ages]
    return found


def test_memory_that_grows_after_the_warm_up_is_trouble(benchmarks: Any) -> None:
    growth = benchmarks["process_samples"].growth
    leaking = growth(life(benchmarks, lambda age: 3e8 + 1e5 * age))
    assert leaking.rss_bytes_per_min == pytest.approx(6e6)
    assert "memory of node-1 grew" in leaking.trouble
    assert growth(life(benchmarks, lambda age: 3e8 + 5e6 * min(age, 40))).trouble == ""


def test_files_that_pile_up_are_trouble(benchmarks: Any) -> None:
    growth = benchmarks["process_samples"].growth
    piling = growth(life(benchmarks, lambda age: 3e8, lambda age: 40 + age // 10))
    assert "open files of node-1 grew" in piling.trouble


def test_a_short_life_says_nothing(benchmarks: Any) -> None:
    short = life(benchmarks, lambda age: 3e8, ages=range(0, 100, 2))
    assert benchmarks["process_samples"].growth(short) is None


def test_event_log_is_measured_over_its_second_half(benchmarks: Any) -> None:
    size = benchmarks["session"].LogSize
    sizes = [size(float(n), 500 * n, 10_000 * min(n, 10) + 50_000 * n, n) for n in range(40)]
    assert benchmarks["figures"].log_bytes_per_step(sizes) == pytest.approx(100)
    assert benchmarks["figures"].log_bytes_per_step(sizes[:6]) is None


def test_soak_begins_and_ends_undisturbed_and_lasts_as_long_as_asked(benchmarks: Any) -> None:
    plan = benchmarks["soak"].stretches(30, 20.0)
    assert plan[0].every_s is plan[-1].every_s is None
    assert sum(s.seconds for s in plan if s.every_s is not None) == pytest.approx(1800)
    assert all(a.every_s != b.every_s for a, b in pairwise(plan))


def a_result(benchmarks: Any, **fields: Any) -> Any:
    """Of a session of two undisturbed stretches and one with a fault that nothing came after."""
    result = benchmarks["session"].Result(steps=61, pairs_per_step=8, **fields)
    hit = outcome(benchmarks, every_s=20.0, steps=18.0, faults=[fault(recovered_after_s=None)])
    result.outcomes = [outcome(benchmarks), hit, outcome(benchmarks)]
    return result


def described(benchmarks: Any, result: Any, differs: str = "", *, compared: bool = True) -> Any:
    soak, plan = benchmarks["soak"], benchmarks["session"].Plan(Path("folder"))
    report = soak.describe(plan, result, 60, differs, compared=compared)
    return report["troubles"], soak.markdown(plan, result, report)


def test_a_soak_without_trouble_is_told_in_rows(benchmarks: Any) -> None:
    troubles, text = described(benchmarks, a_result(benchmarks))
    assert troubles == []
    assert "| weights of the undisturbed run | yes, 60 steps |" in text
    assert "| goodput | 90.0% |" in text
    assert "| kill, a node of several | 1 | 0 | – | – | – |" in text


@pytest.mark.parametrize(
    ("fields", "differs", "told"),
    [
        ({}, "the sums of step 7 differ", "the sums of step 7 differ"),
        ({"steps_lost": 1}, "", "1 steps lost"),
        ({"microbatches_missing": 2}, "", "2 microbatches missing"),
        ({"microbatches_double": 3}, "", "3 counted twice"),
    ],
)
def test_a_soak_that_lost_something_or_ends_elsewhere_is_trouble(
    benchmarks: Any, fields: dict[str, int], differs: str, told: str
) -> None:
    troubles, text = described(benchmarks, a_result(benchmarks, **fields), differs)
    assert told in troubles[0]
    assert ("| weights of the undisturbed run | NO |" in text) == bool(differs)


def test_a_soak_that_leaks_is_trouble(benchmarks: Any) -> None:
    result = a_result(benchmarks)
    result.sampler.lives.append(life(benchmarks, lambda age: 3e8 + 1e5 * age))
    size = benchmarks["session"].LogSize
    result.log_sizes = [size(float(n), 500 * n, 500_000 * n, n) for n in range(40)]
    troubles, text = described(benchmarks, result)
    assert [t.split(" of ")[0].split(" by ")[0] for t in troubles] == [
        "memory", "the event log grows",
    ]  # fmt: skip
    assert "+6.00 MB/min" in text


def test_weights_that_were_not_compared_are_not_told_to_be_equal_or_different(
    benchmarks: Any,
) -> None:
    _, text = described(benchmarks, a_result(benchmarks), compared=False)
    assert "| weights of the undisturbed run | not compared |" in text


def test_goodput_is_measured_at_two_rates_and_computed_at_the_third(benchmarks: Any) -> None:
    result = a_result(benchmarks)
    result.outcomes.append(outcome(benchmarks, every_s=60.0, steps=19.0, faults=[fault()]))
    plan = benchmarks["session"].Plan(Path("folder"))
    rows = benchmarks["goodput"].markdown(plan, result).splitlines()
    assert "| 20 s | 90.0% | 1 | 1.00 s | measured |" in rows
    assert "| 60 s | 95.0% | 1 | 0.50 s | measured |" in rows
    assert any(row.startswith("| 300 s | 99.8% | – | 0.50 s | computed") for row in rows)
