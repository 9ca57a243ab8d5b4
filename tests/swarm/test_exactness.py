# SPDX-License-Identifier: Apache-2.0
"""A swarm of processes ends with the very weights of the same run in one process."""

from pathlib import Path

import pytest

from .harness import Swarm, spec

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("stages", "replicas", "boundary"),
    [
        (2, 2, "bf16"),
        (4, 1, "int8"),
        pytest.param(2, 1, "int8", marks=pytest.mark.full),
        pytest.param(4, 2, "bf16", marks=pytest.mark.full),
        pytest.param(4, 1, "bf16", marks=pytest.mark.full),
        pytest.param(2, 2, "int8", marks=pytest.mark.full),
        pytest.param(1, 2, "fp32", marks=pytest.mark.full),
        # Lengths that depend on the data, scales by channel, stochastic rounding, two formats.
        pytest.param(
            4, 1, "fwd=int4:g16:rot|zstd:3;bwd=int4:c|shuffle|lz4", marks=pytest.mark.full
        ),
        pytest.param(2, 2, "fp8|zstd:1", marks=pytest.mark.full),
    ],
)
async def test_swarm_ends_with_the_bits_of_one_process(
    tmp_path: Path, stages: int, replicas: int, boundary: str
) -> None:
    run = spec(
        model={"num_layers": max(stages, 2)},
        pipeline={"stages": stages, "replicas": replicas, "boundary": boundary},
    )
    async with Swarm(tmp_path, run) as swarm:
        await swarm.start(*(f"n{i}" for i in range(stages * replicas)))
        await swarm.finished()
        swarm.check_exact()
