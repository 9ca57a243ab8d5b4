# SPDX-License-Identifier: Apache-2.0
"""Stages with a learned codec: what must hold for every one of them."""

import math
from pathlib import Path

import pytest
import torch

from shoal.compression.learned.spel import orthogonality_error
from shoal.node.stage import StageRuntime
from shoal.protocol.errors import NumericOverflowError, WrongLeaseError, WrongShapeError
from shoal.protocol.proto.types_pb2 import (
    STATE_PART_ALL,
    STATE_PART_MOMENTS,
    STATE_PART_WEIGHTS,
)
from shoal.protocol.state_file import PARTS, StateExpectation
from shoal.protocol.tensors import run_tensors

from .learned_runs import (
    CODECS,
    MICROBATCHES,
    MODEL,
    batch,
    exchanged,
    exponent,
    make_run,
    new_stage,
    new_stages,
    run_microbatch,
    train_step,
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_loss_falls_and_only_narrow_tensors_cross(codec: str, optimizer: str) -> None:
    stages = new_stages(make_run(codec, optimizer=optimizer))
    losses = [train_step(stages, step) for step in range(1, 13)]
    assert losses[0] == pytest.approx(math.log(MODEL.vocab_size), abs=0.5)
    assert losses[-1] < losses[0] - 0.3
    tokens, _ = batch(1, 0)
    assert stages[0].evaluate(tokens, tokens).shape == (2, MODEL.seq_len, 8)


@pytest.mark.parametrize("codec", CODECS)
def test_recomputing_gives_the_bits_of_the_kept_graph(codec: str) -> None:
    run = make_run(codec)
    kept, again = new_stages(run), [new_stage(run, s, recompute=True) for s in range(3)]
    for stages in (kept, again):
        for step in (1, 2):
            train_step(stages, step)
    for a, b in zip(kept, again, strict=True):
        assert a.sums.abs().max() > 0
        assert torch.equal(a.sums, b.sums)
        assert a.weights_digest() == b.weights_digest()


@pytest.mark.parametrize("codec", CODECS)
def test_replicas_sharing_a_step_sum_to_what_one_node_sums(codec: str) -> None:
    run = make_run(codec)
    alone, first, second = new_stages(run), new_stages(run), new_stages(run)
    for stages in (alone, first, second):
        for stage in stages:
            stage.begin_step(1, exponent(run), 1.0)
    run_microbatch(alone, 1, 0)
    run_microbatch(alone, 1, 1)
    run_microbatch(second, 1, 1)
    run_microbatch(first, 1, 0)
    for a, b, c in zip(alone, first, second, strict=True):
        assert torch.equal(a.sums, b.sums + c.sums)


@pytest.mark.parametrize("codec", CODECS)
def test_state_travels_to_another_replica_and_both_continue_alike(codec: str) -> None:
    run = make_run(codec)
    donors, joiners = new_stages(run), new_stages(run)
    train_step(donors, 1)
    for donor, joiner in zip(donors, joiners, strict=True):
        joiner.load_state(donor.state_tensors(), 1)
    assert train_step(donors, 2) == train_step(joiners, 2)
    for donor, joiner in zip(donors, joiners, strict=True):
        assert donor.weights_digest() == joiner.weights_digest()


@pytest.mark.parametrize("codec", CODECS)
def test_moments_brought_forward_without_weights_are_those_of_whoever_applied(codec: str) -> None:
    run = make_run(codec)
    stages = new_stages(run)
    train_step(stages, 1)
    worker = new_stage(run, 1)
    worker.load_moments(stages[1].state_tensors(("exp_avg", "exp_avg_sq")))
    projections = stages[1].projections()
    before = {name: t.clone() for name, t in stages[1].exp_avg.items()}
    for stage in stages:
        stage.begin_step(2, exponent(run), 1.0)
    for microbatch in range(MICROBATCHES):
        run_microbatch(stages, 2, microbatch)
    totals = exchanged(stages, [stage.sums for stage in stages])[1]
    how = {"num_tokens": 64, "clip_scale": 0.5, "scale_exponent": exponent(run)}
    worker.advance_moments(totals, **how, projections=projections)  # type: ignore[arg-type]
    stages[1].apply(totals, step=2, learning_rate=3e-3, **how)  # type: ignore[arg-type]
    for name, moment in stages[1].exp_avg.items():
        assert torch.equal(moment, worker.exp_avg[name]), name
        assert not torch.equal(moment, before[name]), name
    for name, moment in stages[1].exp_avg_sq.items():
        assert torch.equal(moment, worker.exp_avg_sq[name]), name


@pytest.mark.parametrize("codec", CODECS)
def test_a_runs_parameters_are_those_of_its_stages_each_once(codec: str) -> None:
    run = make_run(codec)
    tensors = run_tensors(run)
    assert len({t.name for t in tensors}) == len(tensors)
    assert {t.name for t in tensors} == {n for stage in new_stages(run) for n in stage.names}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("codec", ["bf16", *CODECS])
def test_a_state_file_is_expected_to_hold_what_a_stage_gives(codec: str, optimizer: str) -> None:
    run = make_run(codec, optimizer=optimizer)
    for part in (STATE_PART_ALL, STATE_PART_WEIGHTS, STATE_PART_MOMENTS):
        for stage in new_stages(run):
            given = {n: tuple(t.shape) for n, t in stage.state_tensors(PARTS[part]).items()}
            expect = StateExpectation.of(run, stage.spec.stage, part=part)
            expect.check_shapes(given, Path("state"))
            assert given
            given.popitem()
            with pytest.raises(WrongShapeError):
                expect.check_shapes(given, Path("state"))


# ---- what both sides of a boundary hold --------------------------------------------------

MIRRORING = [codec for codec in CODECS if codec.startswith("mapl") and "fixed" not in codec]


@pytest.mark.parametrize("codec", MIRRORING)
def test_mirrored_bits_are_equal_on_both_sides_after_twenty_steps(codec: str) -> None:
    run = make_run(codec)
    stages = new_stages(run)
    start = stages[0].weights["boundary.0.projection"].clone()
    for step in range(1, 21):
        train_step(stages, step)
    for boundary in (0, 1):
        name = f"boundary.{boundary}.projection"
        before, after = stages[boundary], stages[boundary + 1]
        assert torch.equal(before.weights[name], after.weights[name])
        assert torch.equal(before.exp_avg[name], after.exp_avg[name])
    assert not torch.equal(start, stages[0].weights["boundary.0.projection"])


@pytest.mark.parametrize("codec", MIRRORING)
def test_only_spel_keeps_columns_orthonormal(codec: str) -> None:
    stages = new_stages(make_run(codec))
    for step in range(1, 21):
        train_step(stages, step)
    error = orthogonality_error(stages[1].weights["boundary.1.projection"])
    assert (error < 1e-6) is ("unaware" not in codec)


def test_sides_that_apply_their_own_share_alone_drift_apart() -> None:
    """So the equality above is the exchange's doing."""
    run = make_run("mapl:r=8")
    stages = new_stages(run)
    for stage in stages:
        stage.begin_step(1, exponent(run), 1.0)
    run_microbatch(stages, 1, 0)
    for stage in stages:
        stage.apply(
            stage.sums, step=1, num_tokens=64, learning_rate=3e-3, clip_scale=1.0,
            scale_exponent=exponent(run),
        )  # fmt: skip
    name = "boundary.0.projection"
    assert not torch.equal(stages[0].weights[name], stages[1].weights[name])


def summed(codec: str) -> list[StageRuntime]:
    run = make_run(codec)
    stages = new_stages(run)
    for stage in stages:
        stage.begin_step(1, exponent(run), 1.0)
    run_microbatch(stages, 1, 0)
    return stages


def test_the_receivers_share_is_zero_with_the_encoder_alone_and_the_senders_is_the_same() -> None:
    full, alone = (summed(f"mapl:r=8:grad={grad}") for grad in ("full", "encoder_only"))
    for boundary in (0, 1):
        sender, receiver = full[boundary], full[boundary + 1]
        assert receiver.share(receiver.sums, boundary).abs().max() > 0
        assert alone[boundary + 1].share(alone[boundary + 1].sums, boundary).abs().max() == 0
        of_sender = alone[boundary].share(alone[boundary].sums, boundary)
        assert torch.equal(sender.share(sender.sums, boundary), of_sender)


def test_both_shares_together_are_the_gradient_of_the_whole_model() -> None:
    """Against autograd through all stages with one projection for both halves."""
    stages = summed("mapl:r=8")
    tokens, targets = batch(1, 0)
    models = [stage._model for stage in stages]
    shared = {}
    for boundary in (0, 1):
        sender = models[boundary].boundary[str(boundary)]
        shared[boundary] = models[boundary + 1].boundary[str(boundary)].projection = (
            sender.projection
        )
    x = tokens
    for model in models:
        x = model(x, tokens)
    loss = torch.nn.functional.cross_entropy(x.flatten(0, 1), targets.flatten(), reduction="sum")
    gradients = torch.autograd.grad(loss, list(shared.values()))
    totals = exchanged(stages, [stage.sums for stage in stages])
    for boundary, gradient in zip(shared, gradients, strict=True):
        for side in (boundary, boundary + 1):
            total = stages[side].share(totals[side], boundary).double()
            ours = total / 2.0 ** exponent(stages[0].run)
            torch.testing.assert_close(
                ours.float().view_as(gradient), gradient, rtol=1e-4, atol=1e-5
            )


def test_a_mirrored_gradient_counts_once_in_the_norm() -> None:
    stages = summed("mapl:r=8")
    totals = exchanged(stages, [stage.sums for stage in stages])
    norms = [s.squared_norms(t, 64) for s, t in zip(stages, totals, strict=True)]
    assert [len(n) for n in norms] == [len(s.names) - (s.spec.stage > 0) for s in stages]
    assert sum(map(len, norms)) == len(run_tensors(stages[0].run))


def test_shares_that_do_not_fit_are_refused_and_nothing_changes() -> None:
    stage = summed("mapl:r=8")[1]
    before = stage.sums.clone()
    share = stage.share(stage.sums, 0)
    with pytest.raises(WrongLeaseError, match=r"boundaries \[0, 1\]"):
        stage.add_shares(stage.sums, {0: share})
    with pytest.raises(WrongShapeError):
        stage.add_shares(stage.sums, {0: share, 1: share[1:]})
    with pytest.raises(WrongShapeError):
        stage.add_shares(stage.sums, {0: share, 1: share.double()})
    with pytest.raises(NumericOverflowError):
        stage.add_shares(stage.sums, {0: share, 1: torch.full_like(share, 2**63 - 1)})
    assert torch.equal(stage.sums, before)


def test_stages_without_anything_mirrored_exchange_nothing() -> None:
    for codec in ("bf16", "resbm:b=8", "mapl:r=8:proj=fixed"):
        stage = new_stage(make_run(codec), 1)
        assert stage.mirrored == {}
        assert torch.equal(stage.add_shares(stage.sums, {}), stage.sums)
