# SPDX-License-Identifier: Apache-2.0
"""What a run is: everything that its result depends on, hashed and immutable once started.

`RunSpec` is what a user writes as RUN.toml. The coordinator resolves it at launch (vocabulary
size, cut points, data digests) into a `ResolvedRun`, which every node receives when it joins.
"""

import difflib
import hashlib
import json
import tomllib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shoal.protocol.errors import ConfigError, VersionError
from shoal.protocol.ids import RunId, Stage
from shoal.protocol.learned import MAX_PROJECTION_LR, PROJECTION_LR_RATIO, MaplSpec, learned_codec
from shoal.version import RUN_SPEC_VERSION

S = TypeVar("S", bound=BaseModel)

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSpec(_Spec):
    """A LLaMA-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    dim: PositiveInt = 256
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    ffn_dim: PositiveInt = 688
    seq_len: PositiveInt = 128
    vocab_size: Annotated[int, Field(ge=0)] = 0
    """0 takes the tokenizer's."""
    rope_theta: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-5
    init_std: PositiveFloat = 0.02

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.dim % self.num_heads:
            raise ValueError(f"dim = {self.dim} must be a multiple of num_heads = {self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} must be a multiple of "
                f"num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"dim / num_heads = {self.head_dim} must be even for rotary positions")
        return self

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


class DataSpec(_Spec):
    source: str = "stdlib"
    """"stdlib" (the Python standard library's sources), or "text:PATH" (a file or folder),
    "jsonl:PATH", "parquet:PATH"."""
    text_field: str = "text"
    """The field that holds the text, in JSONL and Parquet."""
    tokenizer: str = "bpe:2048"
    """"bpe:SIZE" trains one at launch, "byte" takes bytes, "hf:FOLDER" loads a folder."""
    validation_fraction: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    max_bytes: Annotated[int, Field(ge=0)] = 0
    """Read at most so much text; 0 reads all."""


class OptimizerSpec(_Spec):
    """AdamW, or Muon beside it, with linear warm-up and cosine decay of both rates."""

    name: Literal["adamw", "muon"] = "adamw"
    """"muon" updates the matrices of layers and boundaries by Muon; embedding, head, norms and
    anchors keep AdamW (protocol/update_rules.py)."""
    lr: PositiveFloat = 3e-3
    """AdamW's peak rate."""
    muon_lr: PositiveFloat = 0.02
    """Muon's peak rate; it follows the same schedule."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """0 takes a tenth of the steps."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Global gradient norm to clip to; 0 never clips."""


class BatchSpec(_Spec):
    microbatches: PositiveInt = 8
    microbatch_size: PositiveInt = 4
    """Sequences per microbatch."""


class PipelineSpec(_Spec):
    stages: PositiveInt = 2
    replicas: PositiveInt = 2
    """Wanted per stage; the run starts with one of each and takes more at any time."""
    min_nodes: Annotated[int, Field(ge=0)] = 0
    """Wait for so many nodes before the first step; 0 means stages × replicas."""
    boundary: str = "bf16"
    cuts: tuple[int, ...] | None = None
    """First layer of every stage but the first; planned at launch when absent."""
    recompute: Literal["auto", "always", "never"] = "auto"
    """Keep autograd graphs between forward and backward as memory allows, or not."""


class FaultSpec(_Spec):
    snapshot_every: PositiveInt = 50
    """Steps between snapshots; the last step always gets one."""
    heartbeat_s: PositiveFloat = 0.5
    lease_s: PositiveFloat = 5.0
    """A silent node is fenced after this long, or later where heartbeats come irregularly."""
    boundary_log_mb: Annotated[int, Field(ge=0)] = 1024
    """Disk, in units of 10^6 bytes, that each node gives to the log of what it sent over stage
    boundaries; a lost stage is replayed from it. 0 keeps no log: the run rolls back instead."""


class ValidationSpec(_Spec):
    every: Annotated[int, Field(ge=0)] = 10
    """Steps between validations; 0 never validates."""
    microbatches: PositiveInt = 2


class RunSpec(_Spec):
    """RUN.toml."""

    version: int = RUN_SPEC_VERSION
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")] = "run"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    steps: PositiveInt = 100
    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    batch: BatchSpec = BatchSpec()
    pipeline: PipelineSpec = PipelineSpec()
    validation: ValidationSpec = ValidationSpec()
    fault: FaultSpec = FaultSpec()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        layers, stages = self.model.num_layers, self.pipeline.stages
        if stages > layers:
            raise ValueError(
                f"pipeline.stages = {stages} exceeds model.num_layers = {layers}; "
                "a stage holds at least one layer"
            )
        self._check_learned_codec()
        cuts = self.pipeline.cuts
        if cuts is not None:
            bounds = (0, *cuts, layers)
            if len(cuts) != stages - 1 or any(a >= b for a, b in pairwise(bounds)):
                raise ValueError(
                    f"pipeline.cuts = {list(cuts)} must be {stages - 1} ascending layer numbers "
                    f"between 1 and {layers - 1}"
                )
        return self

    def _check_learned_codec(self) -> None:
        try:
            learned = learned_codec(self.pipeline.boundary)
            if learned is not None:
                learned.check(self.model.dim)
        except ConfigError as error:
            raise ValueError(f"pipeline.boundary = {self.pipeline.boundary!r}: {error}") from None
        if not isinstance(learned, MaplSpec) or learned.projection != "spel":
            return
        optimizer = self.optimizer
        field = "muon_lr" if optimizer.name == "muon" else "lr"
        rate = getattr(optimizer, field)
        if PROJECTION_LR_RATIO * rate > MAX_PROJECTION_LR:
            raise ValueError(
                f"optimizer.{field} = {rate} moves MAPL's projections by "
                f"{PROJECTION_LR_RATIO * rate:g} a step, beyond {MAX_PROJECTION_LR}; choose at "
                f"most {MAX_PROJECTION_LR / PROJECTION_LR_RATIO:g}, or proj=fixed"
            )

    @property
    def tokens_per_microbatch(self) -> int:
        return self.batch.microbatch_size * self.model.seq_len

    @property
    def tokens_per_step(self) -> int:
        return self.batch.microbatches * self.tokens_per_microbatch

    @property
    def warmup_steps(self) -> int:
        return self.optimizer.warmup_steps or max(1, self.steps // 10)


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A contiguous range of layers, `start` to `end` (exclusive); the first stage also embeds
    tokens, the last one normalises, projects to the vocabulary and takes the loss."""

    stage: Stage
    num_stages: int
    start: int
    end: int

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1


class ShardRef(_Spec):
    """A content-addressed file of little-endian token ids (uint16 below 65,536 tokens of
    vocabulary, else uint32)."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    num_tokens: PositiveInt


class DataManifest(_Spec):
    """The tokenized text: what samples are drawn from. Shards are concatenated in order."""

    vocab_size: PositiveInt
    token_bytes: Literal[2, 4]
    train: tuple[ShardRef, ...]
    validation: tuple[ShardRef, ...]
    tokenizer_sha256: str
    """Digest of the run folder's tokenizer.json."""


class ResolvedRun(_Spec):
    """A run spec with everything filled in that was decided at launch."""

    run_id: RunId
    spec: RunSpec
    data: DataManifest

    @model_validator(mode="after")
    def _resolved(self) -> Self:
        if self.spec.pipeline.cuts is None:
            raise ValueError("pipeline.cuts must be resolved")
        if self.spec.model.vocab_size != self.data.vocab_size:
            raise ValueError("model.vocab_size must be resolved to the tokenizer's")
        return self

    def stage(self, stage: int) -> StageSpec:
        spec = self.spec
        assert spec.pipeline.cuts is not None
        bounds = (0, *spec.pipeline.cuts, spec.model.num_layers)
        return StageSpec(
            stage=Stage(stage),
            num_stages=spec.pipeline.stages,
            start=bounds[stage],
            end=bounds[stage + 1],
        )

    def to_json(self) -> bytes:
        """Canonical: sorted keys, no spaces. What `digest` hashes."""
        return canonical_json(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json()).hexdigest()


def canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def load_run_spec(path: Path) -> RunSpec:
    """Read RUN.toml. Raises `ConfigError` naming field, value and remedy."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file. Write one, or start from `shoal run example > {path}`."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    version = raw.get("version", RUN_SPEC_VERSION)
    if version != RUN_SPEC_VERSION:
        raise VersionError(
            f"{path}: version = {version!r}, this release reads {RUN_SPEC_VERSION}. "
            "Install the release that wrote it, or rewrite the file."
        )
    return parse_spec(RunSpec, raw, str(path))


def parse_spec(kind: type[S], raw: Any, where: str) -> S:
    """Validate outside input; a misspelt key gets a suggestion."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explain(kind, error)}") from None


def _explain(kind: type[BaseModel], error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"]) or "(whole file)"
        if problem["type"] == "extra_forbidden":
            known = _fields_at(kind, problem["loc"][:-1])
            close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
            lines.append(f"{field}: unknown key; {hint}")
        elif problem["type"] == "value_error":
            lines.append(problem["msg"].removeprefix("Value error, "))
        else:
            lines.append(f"{field} = {repr(problem.get('input'))[:80]}: {problem['msg']}")
    return "; ".join(lines)


def _fields_at(kind: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        field = kind.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        kind = annotation
    return list(kind.model_fields)
