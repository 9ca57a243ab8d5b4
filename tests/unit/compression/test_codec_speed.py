# SPDX-License-Identifier: Apache-2.0
"""The arithmetic behind `benchmarks/codec_speed.py`."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "codec_speed.py"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("codec_speed", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["codec_speed"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["codec_speed"]


def test_codec_pays_off_where_the_wire_takes_longer_than_it(script: ModuleType) -> None:
    # 1 MB less takes 0.1 s on 80 Mbit/s.
    assert script.pays_below_mbit_per_s(saved_bytes=1e6, extra_s=0.1) == pytest.approx(80)


@pytest.mark.parametrize(("saved_bytes", "extra_s"), [(0, 0.1), (-5, 0.1), (1e6, 0.0), (1e6, -1)])
def test_without_a_trade_there_is_no_such_speed(
    script: ModuleType, saved_bytes: float, extra_s: float
) -> None:
    assert script.pays_below_mbit_per_s(saved_bytes=saved_bytes, extra_s=extra_s) is None


def test_every_chain_that_is_measured_exists(script: ModuleType) -> None:
    measured = [script.parse_boundary(spec).spec for spec in script.SPECS]
    assert len(set(measured)) == len(script.SPECS)
    assert script.BASELINE in measured
