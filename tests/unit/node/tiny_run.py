# SPDX-License-Identifier: Apache-2.0
"""The smallest run that has everything: a layer a stage, and one shard."""

from shoal.protocol.ids import RunId
from shoal.protocol.spec import (
    BatchSpec,
    DataManifest,
    ModelSpec,
    PipelineSpec,
    ResolvedRun,
    RunSpec,
    ShardRef,
)


def tiny_run(
    stages: int, *, microbatches: int = 2, microbatch_size: int = 1, boundary: str = "bf16"
) -> ResolvedRun:
    return ResolvedRun(
        run_id=RunId("run-00000000"),
        spec=RunSpec(
            model=ModelSpec(
                dim=16, num_layers=stages, num_heads=2, num_kv_heads=1, ffn_dim=32, seq_len=8,
                vocab_size=257,
            ),
            batch=BatchSpec(microbatches=microbatches, microbatch_size=microbatch_size),
            pipeline=PipelineSpec(
                stages=stages, cuts=tuple(range(1, stages)), boundary=boundary
            ),
        ),
        data=DataManifest(
            vocab_size=257, token_bytes=2, train=(ShardRef(sha256="0" * 64, num_tokens=100),),
            validation=(), tokenizer_sha256="",
        ),
    )  # fmt: skip
