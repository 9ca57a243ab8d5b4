# SPDX-License-Identifier: Apache-2.0
"""What a stage costs: parameters, arithmetic, memory, bytes. Pure arithmetic on specs.

Symbols: d = dim, k = head_dim * num_kv_heads, f = ffn_dim, V = vocab_size, T = seq_len. The model
is that of `ModelSpec`, without biases and with the output projection untied from the embedding
(they live on different nodes). Every function here needs a resolved vocabulary size. `learned` is
the run's learned codec (protocol/learned.py): its halves are parameters of the stages beside a
boundary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.protocol.errors import ConfigError
from shoal.protocol.ids import Stage
from shoal.protocol.learned import LearnedSpec, MaplSpec, SubspaceSpec, learned_codec
from shoal.protocol.learned_tensors import (
    frozen_elements,
    receiver_tensors,
    residual_width,
    sender_tensors,
)
from shoal.protocol.spec import ModelSpec, RunSpec, StageSpec
from shoal.protocol.tensors import owned_tensors, stage_tensors
from shoal.protocol.update_rules import KINDS, state_kinds

FP32_BYTES = 4
TOKEN_ID_BYTES = 8

WEIGHT_BYTES = 4
MOMENT_BYTES = 8
SUM_BYTES = 8
TOTAL_BYTES = 8
GRADIENT_BYTES = 4
PACKED_SUM_BYTES = 5
"""An int64 sum between replicas, packed without loss: an estimate, somewhat above what was
measured on small models (docs/log.md)."""

BYTES_PER_PARAMETER = WEIGHT_BYTES + MOMENT_BYTES + SUM_BYTES + TOTAL_BYTES + GRADIENT_BYTES
"""fp32 weight 4, AdamW's two fp32 moments 8, the int64 accumulator 8, the int64 total that a
reduction returns 8, and one microbatch's fp32 gradient on its way into the accumulator 4."""

BACKWARD_TO_FORWARD = 2
"""A matrix product's backward is two products: for its input and for its weight."""


# ---- parameters --------------------------------------------------------------------------


def layer_parameters(model: ModelSpec) -> int:
    """Wq and Wo d², Wk and Wv dk, SwiGLU's three df, two norms d: 2d² + 2dk + 3df + 2d."""
    d, k, f = model.dim, _kv_dim(model), model.ffn_dim
    return 2 * d * d + 2 * d * k + 3 * d * f + 2 * d


def embedding_parameters(model: ModelSpec) -> int:
    """Vd."""
    return _vocab(model) * model.dim


def head_parameters(model: ModelSpec) -> int:
    """Final norm d, projection Vd."""
    return _vocab(model) * model.dim + model.dim


def stage_parameters(model: ModelSpec, stage: StageSpec, learned: LearnedSpec | None = None) -> int:
    if learned is not None:
        _vocab(model)
        return sum(tensor.num_elements for tensor in stage_tensors(model, stage, learned))
    return (
        (stage.end - stage.start) * layer_parameters(model)
        + stage.is_first * embedding_parameters(model)
        + stage.is_last * head_parameters(model)
    )


def model_parameters(model: ModelSpec) -> int:
    whole = StageSpec(stage=Stage(0), num_stages=1, start=0, end=model.num_layers)
    return stage_parameters(model, whole)


def run_parameters(spec: RunSpec, stages: Sequence[StageSpec]) -> int:
    """With the learned halves, a mirrored parameter counted once."""
    _vocab(spec.model)
    learned = learned_codec(spec.pipeline.boundary)
    owned = (owned_tensors(spec.model, stage, learned) for stage in stages)
    return sum(tensor.num_elements for tensors in owned for tensor in tensors)


# ---- arithmetic --------------------------------------------------------------------------


def layer_forward_flops(model: ModelSpec) -> int:
    """Per token: 2 per matrix weight, and 4Td for attention's two products with T positions.

    The convention of PaLM (Chowdhery et al., arXiv 2204.02311, appendix B), which does not halve
    attention for causality.
    """
    d, k, f = model.dim, _kv_dim(model), model.ffn_dim
    return 2 * (2 * d * d + 2 * d * k + 3 * d * f) + 4 * model.seq_len * d


def head_forward_flops(model: ModelSpec) -> int:
    """Per token: 2Vd. The embedding is a lookup and counts as nothing."""
    return 2 * _vocab(model) * model.dim


def stage_forward_flops(
    model: ModelSpec, stage: StageSpec, learned: LearnedSpec | None = None
) -> int:
    """Per token."""
    dense = (stage.end - stage.start) * layer_forward_flops(
        model
    ) + stage.is_last * head_forward_flops(model)
    return dense + _learned_forward_flops(model, stage, learned)


def _learned_forward_flops(model: ModelSpec, stage: StageSpec, learned: LearnedSpec | None) -> int:
    """Per token, what a learned codec adds: 2 per matrix weight of both halves, or 2dR for a
    projection on R values, and 2dr for anchors of rank r. A reparametrized subspace network saves
    some: a matrix of n inputs takes 2k(n + d) instead of 2nd."""
    if learned is None or stage.num_stages == 1:
        return 0
    d, width = model.dim, learned.width
    flops = 0
    if isinstance(learned, MaplSpec | SubspaceSpec):
        flops += 2 * d * width * ((not stage.is_first) + (not stage.is_last))
    else:
        halves = [] if stage.is_first else receiver_tensors(learned, stage.stage - 1, d)
        halves += [] if stage.is_last else sender_tensors(learned, stage.stage, d)
        flops += 2 * sum(math.prod(shape) for _, shape in halves)
    if isinstance(learned, MaplSpec) and learned.anchors == "factorized":
        flops += 2 * d * learned.anchor_rank(d)
    k = residual_width(learned, d, is_last_stage=stage.is_last)
    if k < d:
        inputs = d + model.ffn_dim  # of Wo and W2
        flops += (stage.end - stage.start) * 2 * (k * (inputs + 2 * d) - inputs * d)
        flops += stage.is_first * 2 * d * k
    return flops


def stage_backward_flops(
    model: ModelSpec,
    stage: StageSpec,
    *,
    recompute: bool = False,
    learned: LearnedSpec | None = None,
) -> int:
    """Per token: twice the forward, and once more where the forward is computed again."""
    return (BACKWARD_TO_FORWARD + recompute) * stage_forward_flops(model, stage, learned)


# ---- memory ------------------------------------------------------------------------------


def layer_graph_bytes(model: ModelSpec) -> int:
    """Per token, what autograd keeps of one layer in fp32: 4 (8d + 2k + 4f + 3h).

    Both norms' inputs and outputs 4d; queries d, keys k, values k; attention's output, before and
    after the heads are joined 2d; one d for temporaries; SwiGLU's two products, the activated gate
    and their product 4f; per head or norm, statistics 3h (h = num_heads). Attention is fused: no
    T² matrix is kept. Lower-precision devices keep less.
    """
    d, k, f, h = model.dim, _kv_dim(model), model.ffn_dim, model.num_heads
    return FP32_BYTES * (8 * d + 2 * k + 4 * f + 3 * h)


def head_working_bytes(model: ModelSpec) -> int:
    """Per token, while the last stage takes the loss: logits, log-probabilities and the logits'
    gradient 3V, norm in and out 2d, in fp32. The last stage goes straight from forward to
    backward, so only one microbatch has it."""
    return FP32_BYTES * (3 * _vocab(model) + 2 * model.dim)


def state_bytes(spec: RunSpec, stage: StageSpec) -> int:
    """`BYTES_PER_PARAMETER`, less 4 for each moment that its update rule doesn't keep (Muon has one
    moment), and 4 for every value of a table that a learned codec draws from the seed."""
    model, learned = spec.model, learned_codec(spec.pipeline.boundary)
    vocab = _vocab(model)
    spared = sum(
        tensor.num_elements * (len(KINDS) - len(state_kinds(spec, tensor)))
        for tensor in stage_tensors(model, stage, learned)
    )
    frozen = 0
    if stage.num_stages > 1:
        frozen = frozen_elements(learned, dim=model.dim, vocab_size=vocab)
    parameters = stage_parameters(model, stage, learned)
    return BYTES_PER_PARAMETER * parameters - FP32_BYTES * spared + FP32_BYTES * frozen


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes that a replica of a stage holds, by purpose. An estimate of tensors; the process, its
    libraries and a GPU's context come on top."""

    state: int
    """Weights, moments, sums: `state_bytes`. Independent of the window."""
    inputs: int
    """The stage's input for every microbatch in flight; from it, the rest can be recomputed."""
    graphs: int
    """Autograd graphs: of every microbatch in flight, or of just the one at work."""
    head: int
    retained: int
    """Encoded boundary tensors, kept until the step commits."""

    @property
    def total(self) -> int:
        return self.state + self.inputs + self.graphs + self.head + self.retained


def stage_memory(
    spec: RunSpec,
    stage: StageSpec,
    *,
    window: int,
    graphs_kept: int,
    forward_bytes: int = 0,
    backward_bytes: int = 0,
) -> StageMemory:
    """Memory at `window` microbatches in flight, `graphs_kept` of them with their graph.

    state = `state_bytes`; inputs = window · tokens · 4 values on the wire (8 per token id where the
    stage reads ids); graphs = max(1, graphs_kept) · tokens · layers · `layer_graph_bytes`; retained
    = all the step's encoded tensors that this stage sends, `forward_bytes` and `backward_bytes`
    being a boundary tensor's encoded sizes, as if the replica did every microbatch itself.
    """
    model, tokens = spec.model, spec.tokens_per_microbatch
    input_bytes = 0 if stage.is_first else FP32_BYTES * boundary_shape(spec)[-1]
    if stage.is_first or reads_token_ids(spec):
        input_bytes += TOKEN_ID_BYTES
    graph_bytes = (stage.end - stage.start) * layer_graph_bytes(model)
    return StageMemory(
        state=state_bytes(spec, stage),
        inputs=window * tokens * input_bytes,
        graphs=max(1, min(graphs_kept, window)) * tokens * graph_bytes,
        head=tokens * head_working_bytes(model) if stage.is_last else 0,
        retained=spec.batch.microbatches * sent_bytes(stage, forward_bytes, backward_bytes),
    )


def graphs_that_fit(
    spec: RunSpec,
    stage: StageSpec,
    memory_bytes: int,
    *,
    window: int,
    forward_bytes: int = 0,
    backward_bytes: int = 0,
) -> int:
    """Autograd graphs, up to `window`, that fit `memory_bytes` beside all else that the stage
    holds; 0 means recompute every forward."""

    def total(graphs_kept: int) -> int:
        return stage_memory(
            spec,
            stage,
            window=window,
            graphs_kept=graphs_kept,
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
        ).total

    graph_bytes = (
        spec.tokens_per_microbatch * (stage.end - stage.start) * layer_graph_bytes(spec.model)
    )
    # The one at work is always there; it counts as kept only where a second fits as well.
    spare = memory_bytes - total(1)
    return 0 if spare < graph_bytes else min(window, 1 + spare // graph_bytes)


# ---- bytes on the wire -------------------------------------------------------------------


def boundary_shape(spec: RunSpec) -> tuple[int, int, int]:
    """[microbatch_size, seq_len, values per token], on both legs: as many values as a learned
    codec leaves, or dim."""
    learned = learned_codec(spec.pipeline.boundary)
    width = learned.width if learned else spec.model.dim
    return (spec.batch.microbatch_size, spec.model.seq_len, width)


def dense_boundary_shape(spec: RunSpec) -> tuple[int, int, int]:
    """[microbatch_size, seq_len, dim]: what would cross without a learned codec."""
    return (spec.batch.microbatch_size, spec.model.seq_len, spec.model.dim)


def reads_token_ids(spec: RunSpec) -> bool:
    """Whether every stage reads its microbatches' token ids, not only the first and the last."""
    learned = learned_codec(spec.pipeline.boundary)
    return learned is not None and learned.needs_token_ids


def sent_bytes(stage: StageSpec, forward_bytes: int, backward_bytes: int) -> int:
    """What a stage sends to its neighbours per microbatch: no activation from the last stage, no
    gradient from the first."""
    return (not stage.is_last) * forward_bytes + (not stage.is_first) * backward_bytes


def received_bytes(stage: StageSpec, forward_bytes: int, backward_bytes: int) -> int:
    return (not stage.is_first) * forward_bytes + (not stage.is_last) * backward_bytes


def boundary_bytes_per_step(spec: RunSpec, forward_bytes: int, backward_bytes: int) -> int:
    """Over all boundaries and microbatches of an undisturbed step, without framing."""
    num_boundaries = spec.pipeline.stages - 1
    return num_boundaries * spec.batch.microbatches * (forward_bytes + backward_bytes)


def reduce_bytes_per_replica(parameters: int, replicas: int) -> int:
    """What a replica sends (and receives) per step: reduce-scatter and all-gather of the packed
    sums in R slices, about 2 · 5 · parameters · (R - 1) / R, rounded up."""
    return math.ceil(2 * PACKED_SUM_BYTES * parameters * (replicas - 1) / replicas)


# ---- time --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds per microbatch on one replica, apart from waiting."""

    compute_s: float
    """Forward and backward."""
    wire_s: float
    """The busier direction of the replica's link."""

    @property
    def period_s(self) -> float:
        """Arithmetic and wire overlap: the longer of the two."""
        return max(self.compute_s, self.wire_s)


def step_seconds(
    stages: Sequence[StageTime],
    *,
    microbatches: int,
    replicas: int,
    hop_s: float,
    latency_s: float,
    reduce_s: float,
) -> float:
    """A synchronous step: (ceil(M / R) - 1) · P + Σ compute + 2 (S - 1) (x + l) + reduction.

    P is the slowest stage's period, the sum the time of the first microbatch through all stages
    and back, x = `hop_s` a boundary tensor's time on the wire, l = `latency_s` one way. Assumes
    the window of `schedule.in_flight_window`; plain 1F1B would expose x + l per microbatch.
    """
    period_s = max(stage.period_s for stage in stages)
    through_s = sum(stage.compute_s for stage in stages)
    hops = len(stages) - 1
    rounds = math.ceil(microbatches / replicas)
    return (rounds - 1) * period_s + through_s + 2 * hops * (hop_s + latency_s) + reduce_s


def _kv_dim(model: ModelSpec) -> int:
    return model.head_dim * model.num_kv_heads


def _vocab(model: ModelSpec) -> int:
    if model.vocab_size == 0:
        raise ConfigError(
            "model.vocab_size = 0 is resolved from the tokenizer first; give it a number"
        )
    return model.vocab_size
