# SPDX-License-Identifier: Apache-2.0
"""What the papers claim exactly: learned codecs against the same model without a boundary.

In fp32, by autograd through all stages at once."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.compression.learned.build import build_halves
from shoal.compression.learned.first_values import subspace_basis
from shoal.compression.learned.halves import StageHalves
from shoal.node.model.initialise import initial_tensor
from shoal.node.model.loss import summed_loss
from shoal.node.model.transformer import StageModel, build_stage_model
from shoal.protocol.learned import SubspaceSpec, learned_codec
from shoal.protocol.spec import ResolvedRun

from .learned_runs import MODEL, batch, make_run, new_stages, train_step

CPU = torch.device("cpu")
D = MODEL.dim


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def unchanged(halves: StageHalves) -> StageHalves:
    return halves


def without_boundary(halves: StageHalves) -> StageHalves:
    """The same model, through which the whole stream flows."""
    return replace(halves, receiver=None, sender=None)


def models(
    run: ResolvedRun, change: Callable[[StageHalves], StageHalves] = unchanged
) -> list[StageModel]:
    """With weights that no symmetry hides: first values, and as much noise."""
    spec, learned, built = run.spec, learned_codec(run.spec.pipeline.boundary), []
    for number in range(spec.pipeline.stages):
        stage = run.stage(number)
        halves = change(build_halves(learned, MODEL, stage, seed=spec.seed, device=CPU))
        model = build_stage_model(MODEL, stage, halves=halves)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                value = initial_tensor(
                    name, parameter.shape, seed=spec.seed, model=MODEL, learned=learned
                )
                parameter.copy_(value)
                if name.startswith("model."):
                    noise = torch.Generator().manual_seed(len(name))
                    parameter.add_(torch.randn(value.shape, generator=noise) * 0.1)
        built.append(model)
    return built


def loss_and_gradients(stages: list[StageModel]) -> tuple[float, dict[str, Tensor]]:
    x, targets = batch(1, 0)
    tokens = x
    for stage in stages:
        x = stage(x, tokens)
    loss = summed_loss(x, targets) / targets.numel()
    named = {n: p for stage in stages for n, p in stage.named_parameters()}
    gradients = torch.autograd.grad(loss, list(named.values()))
    return loss.item(), dict(zip(named, gradients, strict=True))


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


# ---- subspace networks -------------------------------------------------------------------


def basis_of(run: ResolvedRun) -> Tensor:
    learned = learned_codec(run.spec.pipeline.boundary)
    assert isinstance(learned, SubspaceSpec)
    return subspace_basis(learned, seed=run.spec.seed, dim=D)


@pytest.mark.parametrize("cuts", [(1, 2, 3), (2,)])
def test_a_subspace_network_loses_nothing_at_its_boundaries(cuts: tuple[int, ...]) -> None:
    """Loss and every gradient, against the same model with the whole stream crossing."""
    run = make_run("ssn:k=8", cuts)
    loss, gradients = loss_and_gradients(models(run))
    whole_loss, whole = loss_and_gradients(models(run, without_boundary))
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    assert gradients.keys() == whole.keys()
    assert_same_gradients(gradients, whole)


def into_span(name: str, tensor: Tensor, basis: Tensor) -> Tensor:
    if name == "model.embed_tokens.weight":
        return tensor @ basis @ basis.T
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return basis @ (basis.T @ tensor)
    return tensor


def confine(stages: list[StageModel], basis: Tensor) -> None:
    """As `variant=projected` does after every step; the last stage is free."""
    with torch.no_grad():
        for stage in stages[:-1]:
            for name, parameter in stage.named_parameters():
                parameter.copy_(into_span(name, parameter, basis))


def test_the_projected_variant_loses_what_a_step_would_project_away_and_nothing_else() -> None:
    run = make_run("ssn:k=8:variant=projected", (2,))
    basis = basis_of(run)
    compressed, whole = models(run), models(run, without_boundary)
    for stages in (compressed, whole):
        confine(stages, basis)
    loss, gradients = loss_and_gradients(compressed)
    whole_loss, whole_gradients = loss_and_gradients(whole)
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    last = {n for n, _ in compressed[-1].named_parameters()}
    spanned = [
        {n: g if n in last else into_span(n, g, basis) for n, g in found.items()}
        for found in (gradients, whole_gradients)
    ]
    assert_same_gradients(*spanned)
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.allclose(gradients[name], whole_gradients[name], atol=1e-5)


def outside(gradient: Tensor, basis: Tensor) -> float:
    """The share of a matrix that lies outside the span."""
    return ((gradient - basis @ (basis.T @ gradient)).norm() / gradient.norm()).item()


@pytest.mark.parametrize(("cuts", "layers"), [((1,), 1), ((2,), 2)])
def test_only_the_gradient_next_to_a_boundary_lies_in_the_subspace(
    cuts: tuple[int, ...], layers: int
) -> None:
    """So every matrix that writes into the stream must be projected, not only the last one."""
    run = make_run("ssn:k=8:variant=projected", cuts)
    basis = basis_of(run)
    stages = models(run)
    confine(stages, basis)
    _, gradients = loss_and_gradients(stages)
    last = layers - 1
    nearest = gradients[f"model.layers.{last}.mlp.down_proj.weight"]
    assert outside(nearest, basis) < 1e-6
    assert outside(nearest.sign(), basis) > 0.3  # where Adam's first step goes
    assert outside(gradients[f"model.layers.{last}.self_attn.o_proj.weight"], basis) > 0.01
    if layers == 2:
        assert outside(gradients["model.layers.0.mlp.down_proj.weight"], basis) > 0.01


def test_the_projected_variant_is_back_in_the_subspace_after_every_step() -> None:
    run = make_run("ssn:k=8:variant=projected", (2,), optimizer="adamw")
    stages, basis = new_stages(run), basis_of(run)
    for step in (1, 2, 3):
        train_step(stages, step)
        for name, weights in stages[0].weights.items():
            torch.testing.assert_close(
                weights, into_span(name, weights, basis), rtol=0, atol=1e-6, msg=name
            )
    free = stages[1].weights["model.layers.3.mlp.down_proj.weight"]
    assert outside(free, basis) > 0.5


# ---- MAPL and bottlenecks ----------------------------------------------------------------


def test_mapl_at_full_width_without_anchors_equals_the_dense_model() -> None:
    loss, gradients = loss_and_gradients(models(make_run(f"mapl:r={D}")))
    dense_loss, dense = loss_and_gradients(models(make_run("bf16")))
    assert loss == pytest.approx(dense_loss, rel=1e-6)
    assert_same_gradients(gradients, dense)
    assert gradients.keys() > dense.keys()


def test_an_anchor_is_subtracted_before_the_boundary_and_added_after_it() -> None:
    """With one table on all stages, anchors of any size change nothing at full width."""
    stages = models(make_run(f"mapl:r={D}:anchors=full"))
    table = torch.randn(MODEL.vocab_size, D, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for number, stage in enumerate(stages):
            stage.get_parameter(f"anchors.{number}.weight").copy_(table)
    loss, gradients = loss_and_gradients(stages)
    dense_loss, dense = loss_and_gradients(models(make_run("bf16")))
    assert loss == pytest.approx(dense_loss, rel=1e-5)
    assert_same_gradients(gradients, dense)


def test_what_mapl_drops_is_what_the_projection_does_not_reach() -> None:
    run = make_run("mapl:r=8", (2,))
    stages = models(run)
    with torch.no_grad():
        for number, stage in enumerate(stages):
            table = stage.get_parameter(f"anchors.{number}.weight")
            table.copy_(torch.randn(table.shape, generator=torch.Generator().manual_seed(number)))
    tokens, _ = batch(1, 0)
    with torch.no_grad():
        stream = models(run, without_boundary)[0](tokens, tokens)
        first, second = (stage._halves for stage in stages)
        assert first.side is not None
        assert second.side is not None
        assert second.receiver is not None
        projection = stages[0].get_parameter("boundary.0.projection")
        narrow = stages[0](tokens, tokens)
        torch.testing.assert_close(narrow, (stream - first.side(tokens)) @ projection)
        wide, again = second.receiver(narrow, second.side(tokens))
        assert wide is again
        expected = (stream - first.side(tokens)) @ projection @ projection.T
        torch.testing.assert_close(wide, expected + second.side(tokens))


def test_a_bottleneck_at_full_width_with_nothing_learned_equals_the_dense_model() -> None:
    stages = models(make_run(f"resbm:b={D}"))
    with torch.no_grad():
        for stage in stages:
            for name, parameter in stage.named_parameters():
                if name.startswith("boundary."):
                    parameter.zero_()
    loss, gradients = loss_and_gradients(stages)
    dense_loss, dense = loss_and_gradients(models(make_run("bf16")))
    assert loss == dense_loss
    assert_same_gradients(gradients, dense)


def test_a_bottleneck_passes_the_streams_first_coordinates_untouched() -> None:
    stages = models(make_run("resbm:b=8", (2,)))
    with torch.no_grad():
        for stage in stages:
            for name, parameter in stage.named_parameters():
                if name.startswith("boundary."):
                    parameter.zero_()
        tokens, _ = batch(1, 0)
        stream = models(make_run("bf16", (2,)))[0](tokens)
        narrow = stages[0](tokens)
        receiver = stages[1]._halves.receiver
        assert receiver is not None
        wide, _ = receiver(narrow, None)
    assert torch.equal(narrow, stream[..., :8])
    assert torch.equal(wide[..., :8], narrow)
    assert wide[..., 8:].abs().max() == 0


def test_iotas_form_lies_inside_the_branches_of_the_layers_beside_the_boundary() -> None:
    """Against its formula, with one layer on both sides."""
    run = make_run("resbm:b=8:form=iota", (1, 2, 3))
    stages = models(run)
    middle = stages[1]
    layer = middle.model.layers["1"]
    decoder = middle.get_parameter("boundary.0.decoder.0.weight")
    encoder = middle.get_parameter("boundary.1.encoder.0.weight")
    z = torch.randn(2, MODEL.seq_len, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        cos, sin = middle._positions(MODEL.seq_len, CPU)
        read = torch.relu(z @ decoder.T)
        h = layer.self_attn(layer.input_layernorm(read), cos, sin)
        h = h + torch.cat((z, torch.zeros(2, MODEL.seq_len, D - 8)), dim=-1)
        n, mlp = layer.post_attention_layernorm(h), layer.mlp
        branch = mlp.down_proj(F.silu(mlp.gate_proj(n)) * mlp.up_proj(n))
        expected = F.silu(branch) @ encoder.T + h[..., :8]
        torch.testing.assert_close(middle(z), expected)


def test_without_its_identity_a_bottleneck_carries_only_what_it_learned() -> None:
    for codec in ("resbm:b=8:identity=off", "resbm:b=8:form=iota:identity=off", "linear:b=8"):
        stages = models(make_run(codec, (2,)))
        tokens, _ = batch(1, 0)
        with torch.no_grad():
            for name, parameter in stages[0].named_parameters():
                if name.startswith("boundary."):
                    parameter.zero_()
            assert stages[0](tokens).abs().max() == 0
