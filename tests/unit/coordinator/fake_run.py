# SPDX-License-Identifier: Apache-2.0
"""The run of a fake swarm: its shape, and the authority that signs for it."""

from pathlib import Path
from tempfile import TemporaryDirectory

from shoal.protocol.authority import Authority
from shoal.protocol.ids import RunId
from shoal.protocol.spec import (
    BatchSpec,
    DataManifest,
    FaultSpec,
    ModelSpec,
    PipelineSpec,
    ResolvedRun,
    RunSpec,
    ShardRef,
    ValidationSpec,
)

with TemporaryDirectory() as _folder:
    AUTHORITY = Authority.load_or_create(Path(_folder) / "keys")


def make_run(
    *, stages: int = 2, steps: int = 4, microbatches: int = 4, snapshot_every: int = 2,
    validation_every: int = 3, min_nodes: int = 0, replicas: int = 2, boundary_log_mb: int = 1,
) -> ResolvedRun:  # fmt: skip
    shard = ShardRef(sha256="0" * 64, num_tokens=1000)
    return ResolvedRun(
        run_id=RunId("run-00000000"),
        spec=RunSpec(
            steps=steps,
            model=ModelSpec(
                dim=16, num_layers=stages, num_heads=4, num_kv_heads=2, ffn_dim=24, seq_len=8,
                vocab_size=40,
            ),
            batch=BatchSpec(microbatches=microbatches, microbatch_size=1),
            pipeline=PipelineSpec(
                stages=stages, replicas=replicas, min_nodes=min_nodes,
                cuts=tuple(range(1, stages)),
            ),
            validation=ValidationSpec(every=validation_every, microbatches=2),
            fault=FaultSpec(
                snapshot_every=snapshot_every, heartbeat_s=0.5, lease_s=5.0,
                boundary_log_mb=boundary_log_mb,
            ),
        ),
        data=DataManifest(
            vocab_size=40, token_bytes=2, train=(shard,), validation=(shard,),
            tokenizer_sha256="0" * 64,
        ),
    )  # fmt: skip
