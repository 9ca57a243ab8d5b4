# SPDX-License-Identifier: Apache-2.0
"""A stage's runtime: graphs or recomputation, exactly-once sums, state, refusals."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.node.fixed_point import combine
from shoal.node.stage import ComputeDtype, StageRuntime
from shoal.protocol.errors import (
    NonFiniteError,
    NonFiniteLossError,
    NumericOverflowError,
    ProtocolError,
    WrongLeaseError,
    WrongShapeError,
    WrongStepError,
)
from shoal.protocol.ids import RunId
from shoal.protocol.scale import scale_exponent
from shoal.protocol.spec import (
    BatchSpec,
    DataManifest,
    ModelSpec,
    PipelineSpec,
    ResolvedRun,
    RunSpec,
)

MODEL = ModelSpec(
    dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=172, seq_len=32, vocab_size=257
)
MICROBATCHES = 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_run(stages: int) -> ResolvedRun:
    cuts = tuple(range(4 // stages, 4, 4 // stages))
    spec = RunSpec(
        seed=5,
        model=MODEL,
        batch=BatchSpec(microbatches=MICROBATCHES, microbatch_size=2),
        pipeline=PipelineSpec(stages=stages, cuts=cuts),
    )
    manifest = DataManifest(
        vocab_size=257, token_bytes=2, train=(), validation=(), tokenizer_sha256=""
    )
    return ResolvedRun(run_id=RunId("run-00000000"), spec=spec, data=manifest)


RUNS = {stages: make_run(stages) for stages in (1, 2, 4)}
EXPONENT = scale_exponent(RUNS[1].spec.tokens_per_step)


def make_stage(
    stages: int, stage: int, dtype: ComputeDtype = "fp32", *, recompute: bool = False
) -> StageRuntime:
    runtime = StageRuntime(
        RUNS[stages], stage, device=CPU, compute_dtype=dtype, recompute=recompute
    )
    runtime.initialise()
    runtime.begin_step(1, EXPONENT, 1.0)
    return runtime


def batch(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    tokens = torch.randint(0, 257, (2, MODEL.seq_len + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def hidden(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, MODEL.seq_len, MODEL.dim, generator=generator)


def run_microbatch(stages: list[StageRuntime], step: int, microbatch: int) -> float:
    """Through the chain and back, boundaries passing the very tensors."""
    x, targets = batch(step, microbatch)
    for stage in stages[:-1]:
        x = stage.forward(microbatch, x).clone()
    loss, gradient = stages[-1].forward_backward_loss(microbatch, x, targets)
    for stage in reversed(stages[:-1]):
        assert gradient is not None
        gradient = stage.backward(microbatch, gradient.clone())
    assert gradient is None
    return loss


def commit(stages: list[StageRuntime], step: int, totals: list[torch.Tensor]) -> float:
    tokens = RUNS[1].spec.tokens_per_step
    squared = [
        norm
        for stage, total in zip(stages, totals, strict=True)
        for norm in stage.squared_norms(total, tokens)
    ]
    norm = math.sqrt(math.fsum(squared))
    for stage, total in zip(stages, totals, strict=True):
        stage.apply(
            total,
            step=step,
            num_tokens=tokens,
            learning_rate=1e-2,
            clip_scale=min(1.0, 1.0 / norm),
            scale_exponent=EXPONENT,
        )
    return norm


def train(num_stages: int, steps: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> list[StageRuntime]:
    stages = [make_stage(num_stages, s) for s in range(num_stages)]
    for step in range(1, steps + 1):
        for stage in stages:
            stage.begin_step(step, EXPONENT, 1.0)
        for microbatch in order:
            run_microbatch(stages, step, microbatch)
        commit(stages, step, [stage.sums for stage in stages])
    return stages


def all_state(stages: list[StageRuntime]) -> dict[str, torch.Tensor]:
    return {key: t for stage in stages for key, t in stage.state_tensors().items()}


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [key for key in a if not torch.equal(a[key], b[key])] == []


@pytest.fixture(scope="module")
def trained_whole() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    return all_state(train(1, 4))


@pytest.mark.parametrize("num_stages", [2, 4])
def test_any_number_of_stages_gives_the_same_bits(
    num_stages: int, trained_whole: dict[str, torch.Tensor]
) -> None:
    assert_same_bits(all_state(train(num_stages, 4)), trained_whole)


def test_order_of_microbatches_gives_the_same_bits(trained_whole: dict[str, torch.Tensor]) -> None:
    assert_same_bits(all_state(train(1, 4, order=(2, 0, 3, 1))), trained_whole)


def test_replicas_sharing_a_step_sum_to_what_one_node_sums() -> None:
    alone, first, second = (make_stage(1, 0) for _ in range(3))
    for microbatch in range(MICROBATCHES):
        run_microbatch([alone], 1, microbatch)
        run_microbatch([first if microbatch == 2 else second], 1, microbatch)
    assert first.accumulated == {2}
    totals = combine([first.sums, second.sums])
    assert torch.equal(totals, alone.sums)
    assert alone.sums_digest(alone.sums) == first.sums_digest(totals)
    assert alone.sums.abs().max() > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recomputing_gives_the_bits_of_the_kept_graph(dtype: ComputeDtype) -> None:
    kept, again = make_stage(2, 0, dtype), make_stage(2, 0, dtype, recompute=True)
    mixed = make_stage(2, 0, dtype)
    mixed.max_graphs = 1
    for stage in (kept, again, mixed):
        for microbatch in range(3):
            stage.forward(microbatch, batch(1, microbatch)[0])
        for microbatch in range(3):
            stage.backward(microbatch, hidden(microbatch))
    assert kept.sums.abs().max() > 0
    assert torch.equal(kept.sums, again.sums)
    assert torch.equal(kept.sums, mixed.sums)


def test_middle_stage_returns_the_same_input_gradient_either_way() -> None:
    results = []
    for recompute in (False, True):
        stage = make_stage(4, 1, recompute=recompute)
        out = stage.forward(0, hidden(1))
        assert out.dtype == torch.float32
        assert not out.requires_grad
        results.append((out, stage.backward(0, hidden(2))))
    (out_a, grad_a), (out_b, grad_b) = results
    assert grad_a is not None
    assert grad_b is not None
    assert torch.equal(out_a, out_b)
    assert torch.equal(grad_a, grad_b)


def test_repeated_backward_counts_once_and_returns_the_same_gradient() -> None:
    stage = make_stage(2, 1)
    x, targets = hidden(1), batch(1, 0)[1]
    loss, gradient = stage.forward_backward_loss(0, x, targets)
    sums = stage.sums.clone()
    loss_again, gradient_again = stage.forward_backward_loss(0, x.clone(), targets)
    assert gradient is not None
    assert gradient_again is not None
    assert loss == loss_again
    assert torch.equal(gradient, gradient_again)
    assert torch.equal(stage.sums, sums)
    assert stage.accumulated == {0}


def test_loss_scale_is_undone_exactly() -> None:
    plain, scaled = make_stage(1, 0), make_stage(1, 0)
    scaled.begin_step(1, EXPONENT, 1024.0)
    assert run_microbatch([plain], 1, 0) == run_microbatch([scaled], 1, 0)
    assert torch.equal(plain.sums, scaled.sums)


def redone(dtype: ComputeDtype, before: tuple[int, float], after: tuple[int, float]) -> Tensor:
    """Sums of a step that was begun at one (exponent, loss scale) and redone at another."""
    stage = make_stage(1, 0, dtype)
    stage.begin_step(1, *before)
    run_microbatch([stage], 1, 0)
    run_microbatch([stage], 1, 1)
    stage.begin_step(1, *after)
    for microbatch in (3, 1, 0, 2):
        run_microbatch([stage], 1, microbatch)
    return stage.sums.clone()


def from_the_start(dtype: ComputeDtype, scale: tuple[int, float]) -> Tensor:
    stage = make_stage(1, 0, dtype)
    stage.begin_step(1, *scale)
    for microbatch in range(MICROBATCHES):
        run_microbatch([stage], 1, microbatch)
    return stage.sums.clone()


def test_a_step_redone_with_a_coarser_exponent_has_the_sums_of_one_begun_with_it() -> None:
    coarse = scale_exponent(RUNS[1].spec.tokens_per_step, coarsen=8)
    sums = redone("fp32", (EXPONENT, 1.0), (coarse, 1.0))
    assert torch.equal(sums, from_the_start("fp32", (coarse, 1.0)))
    assert not torch.equal(sums, from_the_start("fp32", (EXPONENT, 1.0)))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_step_redone_with_another_loss_scale_has_the_sums_of_one_begun_with_it(
    dtype: ComputeDtype,
) -> None:
    sums = redone(dtype, (EXPONENT, 1024.0), (EXPONENT, 256.0))
    assert torch.equal(sums, from_the_start(dtype, (EXPONENT, 256.0)))
    # In fp32 a power of two leaves no trace; in fp16 it decides which small values are lost.
    assert torch.equal(sums, from_the_start(dtype, (EXPONENT, 1024.0))) is (dtype == "fp32")


def test_an_fp16_gradient_that_overflows_fits_a_smaller_loss_scale() -> None:
    stage = make_stage(1, 0, "fp16")
    stage.begin_step(1, EXPONENT, 2.0**24)
    with pytest.raises(NonFiniteError) as caught:
        run_microbatch([stage], 1, 0)
    assert not isinstance(caught.value, NonFiniteLossError)
    assert stage.accumulated == set()
    assert stage.sums.abs().max() == 0
    stage.begin_step(1, EXPONENT, 1024.0)
    run_microbatch([stage], 1, 0)
    assert stage.accumulated == {0}


def test_a_coarse_step_commits_to_nearly_the_same_weights() -> None:
    """The commit divides by the scale that the sums have."""
    coarse = scale_exponent(RUNS[1].spec.tokens_per_step, coarsen=8)
    fine_stage, coarse_stage = make_stage(1, 0), make_stage(1, 0)
    for stage, exponent in ((fine_stage, EXPONENT), (coarse_stage, coarse)):
        stage.begin_step(1, exponent, 1.0)
        run_microbatch([stage], 1, 0)
        stage.apply(
            stage.sums, step=1, num_tokens=64, learning_rate=1e-2, clip_scale=1.0,
            scale_exponent=exponent,
        )  # fmt: skip
    for name, weights in fine_stage.weights.items():
        assert torch.allclose(weights, coarse_stage.weights[name], atol=1e-4)


def test_bf16_stays_near_fp32() -> None:
    exact, cast = make_stage(1, 0), make_stage(1, 0, "bf16")
    assert run_microbatch([cast], 1, 0) == pytest.approx(run_microbatch([exact], 1, 0), rel=1e-2)
    difference = (cast.sums - exact.sums).double().norm() / exact.sums.double().norm()
    assert 0 < difference.item() < 0.05


def test_beginning_a_step_again_forgets_everything() -> None:
    stage = make_stage(2, 0)
    stage.forward(0, batch(1, 0)[0])
    stage.backward(0, hidden(0))
    stage.forward(1, batch(1, 1)[0])
    stage.begin_step(1, EXPONENT, 1.0)
    assert stage.accumulated == set()
    assert stage.sums.abs().max() == 0
    with pytest.raises(WrongLeaseError):
        stage.backward(1, hidden(1))


def test_dropped_microbatch_needs_a_new_forward() -> None:
    stage = make_stage(2, 0)
    stage.forward(0, batch(1, 0)[0])
    stage.drop(0)
    stage.drop(17)
    with pytest.raises(WrongLeaseError, match="microbatch 0"):
        stage.backward(0, hidden(0))


def test_non_finite_gradient_adds_nothing_and_may_be_repeated() -> None:
    stage, calm = make_stage(4, 1), make_stage(4, 1)
    for runtime in (stage, calm):
        runtime.forward(0, hidden(1))
    bad = hidden(2)
    bad[0, 0, 0] = math.nan
    with pytest.raises(NonFiniteError):
        stage.backward(0, bad)
    assert stage.sums.abs().max() == 0
    assert stage.accumulated == set()
    stage.backward(0, hidden(2))
    calm.backward(0, hidden(2))
    assert torch.equal(stage.sums, calm.sums)


def test_a_poisoned_gradient_is_refused_once_and_the_repetition_is_sound() -> None:
    stage, calm = make_stage(4, 1), make_stage(4, 1)
    for runtime in (stage, calm):
        runtime.forward(0, hidden(1))
    stage.poisoned = True
    with pytest.raises(NonFiniteError):
        stage.backward(0, hidden(2))
    stage.backward(0, hidden(2))
    calm.backward(0, hidden(2))
    assert torch.equal(stage.sums, calm.sums)


def test_overflowing_gradient_is_refused_and_fits_a_coarser_scale() -> None:
    stage = make_stage(2, 0)
    stage.forward(0, batch(1, 0)[0])
    with pytest.raises(NumericOverflowError):
        stage.backward(0, hidden(2) * 1e7)
    assert stage.accumulated == set()
    stage.begin_step(1, EXPONENT - 20, 1.0)
    stage.forward(0, batch(1, 0)[0])
    stage.backward(0, hidden(2) * 1e7)
    assert stage.accumulated == {0}


def test_non_finite_activation_and_loss_are_not_sent_on() -> None:
    first, last = make_stage(2, 0), make_stage(2, 1)
    for stage in (first, last):
        next(iter(stage.weights.values())).fill_(math.inf)
    with pytest.raises(NonFiniteError):
        first.forward(0, batch(1, 0)[0])
    with pytest.raises(NonFiniteError):
        first.evaluate(batch(1, 0)[0])
    with pytest.raises(NonFiniteLossError):
        last.forward_backward_loss(0, hidden(1), batch(1, 0)[1])
    with pytest.raises(NonFiniteLossError):
        last.evaluate_loss(hidden(1), batch(1, 0)[1])


def test_evaluation_equals_the_training_loss_and_keeps_nothing() -> None:
    first, last = make_stage(2, 0), make_stage(2, 1)
    tokens, targets = batch(1, 0)
    loss = last.evaluate_loss(first.evaluate(tokens), targets)
    assert last.sums.abs().max() == 0
    assert loss == pytest.approx(run_microbatch([first, last], 1, 0), rel=1e-6)
    assert loss / targets.numel() == pytest.approx(math.log(257), abs=0.1)


def test_inputs_of_another_shape_or_dtype_are_refused() -> None:
    first, last = make_stage(2, 0), make_stage(2, 1)
    tokens, targets = batch(1, 0)
    with pytest.raises(WrongShapeError):
        first.forward(0, tokens[:, 1:])
    with pytest.raises(WrongShapeError):
        first.forward(0, tokens.to(torch.int32))
    with pytest.raises(WrongShapeError):
        last.forward_backward_loss(0, hidden(1)[..., 1:], targets)
    with pytest.raises(WrongShapeError):
        last.forward_backward_loss(0, hidden(1), targets[:1])
    first.forward(0, tokens)
    with pytest.raises(WrongShapeError):
        first.backward(0, hidden(1).bfloat16())
    with pytest.raises(WrongShapeError):
        first.squared_norms(first.sums[1:], 8)


def test_state_travels_to_another_replica_and_both_continue_alike() -> None:
    [donor] = train(1, 2)
    joiner = StageRuntime(RUNS[1], 0, device=CPU, compute_dtype="fp32")
    joiner.load_state(donor.state_tensors(), 2)
    assert joiner.step == donor.step == 2
    assert joiner.weights_digest() == donor.weights_digest()
    for stage in (donor, joiner):
        stage.begin_step(3, EXPONENT, 1.0)
        run_microbatch([stage], 3, 0)
        commit([stage], 3, [stage.sums])
    assert_same_bits(all_state([donor]), all_state([joiner]))


def test_state_that_does_not_fit_changes_nothing() -> None:
    stage = make_stage(2, 0)
    digest = stage.weights_digest()
    good = {key: t + 1 for key, t in stage.state_tensors().items()}
    last = list(good)[-1]
    for bad in (
        {k: t for k, t in good.items() if k != last},
        good | {"weights/extra": torch.zeros(1)},
        good | {last: good[last].double()},
        good | {last: good[last][1:]},
    ):
        with pytest.raises(WrongShapeError):
            stage.load_state(bad, 3)
    assert stage.weights_digest() == digest
    assert stage.step == 0


def test_moments_brought_forward_without_weights_are_those_of_whoever_applied() -> None:
    """And so are the weights that they make, with weights that came from elsewhere."""
    [holder], worker = [make_stage(1, 0)], make_stage(1, 0)
    totals: list[torch.Tensor] = []

    def train(step: int) -> None:
        for microbatch in range(MICROBATCHES):
            run_microbatch([holder], step, microbatch)
        totals.append(holder.sums.clone())
        commit([holder], step, [totals[-1]])
        if step < 6:
            holder.begin_step(step + 1, EXPONENT, 1.0)

    def committed(step: int) -> dict[str, Any]:
        squared = holder.squared_norms(totals[step - 1], RUNS[1].spec.tokens_per_step)
        return {
            "num_tokens": RUNS[1].spec.tokens_per_step,
            "clip_scale": min(1.0, 1.0 / math.sqrt(math.fsum(squared))),
            "scale_exponent": EXPONENT,
        }

    for step in (1, 2):
        train(step)
    worker.load_moments(holder.state_tensors(("exp_avg", "exp_avg_sq")))
    for step in (3, 4, 5):
        train(step)
        worker.advance_moments(totals[step - 1], **committed(step))
    worker.load_weights(holder.state_tensors(("weights",)), 5)
    train(6)
    worker.apply(totals[5], step=6, learning_rate=1e-2, **committed(6))
    assert worker.step == holder.step == 6
    for name, tensor in holder.state_tensors().items():
        assert torch.equal(worker.state_tensors()[name], tensor), name
    assert worker.weights_digest() == holder.weights_digest()


def test_a_part_of_a_state_is_no_state_and_the_other_way_round() -> None:
    stage = make_stage(2, 0)
    state = stage.state_tensors()
    weights = stage.state_tensors(("weights",))
    with pytest.raises(WrongShapeError):
        stage.load_state(weights, 1)
    with pytest.raises(WrongShapeError):
        stage.load_weights(state, 1)
    with pytest.raises(WrongShapeError):
        stage.load_moments(weights)


def test_state_tensors_are_copies() -> None:
    stage = make_stage(2, 0)
    digest = stage.weights_digest()
    for tensor in stage.state_tensors().values():
        tensor.add_(1)
    assert stage.weights_digest() == digest


def test_steps_out_of_turn_and_odd_scales_are_refused() -> None:
    stage = make_stage(1, 0)
    for step in (0, 2):
        with pytest.raises(WrongStepError):
            stage.begin_step(step, EXPONENT, 1.0)
    for exponent, loss_scale in ((5000, 1.0), (40, 3.0), (40, 0.0), (40, math.inf), (40, -2.0)):
        with pytest.raises(ProtocolError):
            stage.begin_step(1, exponent, loss_scale)
    digest = stage.weights_digest()
    with pytest.raises(WrongStepError):
        stage.apply(
            stage.sums, step=2, num_tokens=1, learning_rate=1.0, clip_scale=1.0, scale_exponent=40
        )
    assert stage.weights_digest() == digest


def test_stages_initialise_to_the_whole_models_weights() -> None:
    parts = [make_stage(4, s) for s in range(4)]
    assert_same_bits(all_state(parts), all_state([make_stage(1, 0)]))
    assert sum(p.memory for p in parts) == make_stage(1, 0).memory
    assert parts[0].memory == sum(parts[0].numels) * (3 * 4 + 8)
