# SPDX-License-Identifier: Apache-2.0
"""`shoal check`: verdicts, warnings and what is refused."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from shoal.coordinator.check import HardwareAssumption, check_run, resolve_vocab_size
from shoal.coordinator.check_report import render
from shoal.protocol import costs
from shoal.protocol.errors import ConfigError
from shoal.protocol.spec import RunSpec


def run_spec(**pipeline: Any) -> RunSpec:
    return RunSpec.model_validate({"pipeline": pipeline})


FAST = HardwareAssumption(flops=1e10, link_bps=1e9, latency_s=0.001)


def test_report_adds_up() -> None:
    report = check_run(run_spec(stages=4, replicas=2), hardware=FAST)
    assert sum(stage.parameters for stage in report.stages) == report.parameters
    assert sum(stage.sent_bytes_per_step for stage in report.stages) == (
        report.boundary_bytes_per_step
    )
    assert report.boundary_bytes_per_step == 3 * 8 * 2 * (4 * 128 * 256 * 2)
    assert report.cuts == (1, 2, 3)
    assert report.vocab_size == 2048
    assert report.tokens_per_s == pytest.approx(report.tokens_per_step / report.step_s)
    assert all(stage.window <= 8 for stage in report.stages)
    assert all(s.reduce_bytes_per_step == 5 * s.parameters for s in report.stages)


@pytest.mark.parametrize(
    ("boundary", "canonical", "ratio_bf16"),
    [
        ("fp32", "fp32", 0.5),
        ("bf16", "bf16", 1.0),
        ("int8", "int8:g64", 2 / (1 + 4 / 64)),
        ("fwd=bf16;bwd=int8", "fwd=bf16;bwd=int8:g64", 4 / (3 + 4 / 64)),
        ("int4", "int4:g64", 16 / 4.25),
        ("int4:c", "int4:g64:c", 16 / 4.25),
        ("fp8", "fp8:g64", 16 / 8.125),
        ("shuffle", "bf16|shuffle", 1.0),
    ],
)
def test_ratio_is_dense_bytes_over_encoded_bytes(
    boundary: str, canonical: str, ratio_bf16: float
) -> None:
    report = check_run(run_spec(boundary=boundary))
    assert report.boundary == canonical
    assert report.ratio_bf16 == pytest.approx(ratio_bf16)
    assert report.ratio_fp32 == pytest.approx(2 * ratio_bf16)


def test_compressed_boundaries_are_an_upper_bound_and_say_so() -> None:
    exact, bound = check_run(run_spec(boundary="int8")), check_run(run_spec(boundary="int8|zstd:3"))
    assert exact.boundary_bytes_exact
    assert not bound.boundary_bytes_exact
    assert exact.forward_bytes < bound.forward_bytes < 1.01 * exact.forward_bytes
    said = io.StringIO()
    Console(file=said, width=200).print(render(bound))
    assert "boundary int8:g64|zstd:3: at most " in said.getvalue()


@pytest.mark.parametrize(
    ("boundary", "reason"),
    [
        ("int9", "did you mean 'int8'"),
        ("zstd:3|int8", "the order is"),
        ("int8|int4", "at most once"),
        ("int8|zstd:3|shuffle", "write 'shuffle|zstd:3'"),
        ("zstd:99", "level from 1 to 19"),
    ],
)
def test_bad_codec_is_refused_with_field_and_reason(boundary: str, reason: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^pipeline\.boundary '{re.escape(boundary)}'.*{reason}"
    ):
        check_run(run_spec(boundary=boundary))


@pytest.mark.parametrize(
    ("tokenizer", "model_vocab", "given", "size"),
    [
        ("bpe:5000", 0, None, 5000),
        ("byte", 0, None, 257),
        ("hf:folder", 0, 777, 777),
        ("hf:folder", 888, None, 888),
        ("bpe:5000", 0, 4999, 4999),
    ],
)
def test_vocabulary_is_resolved(
    tokenizer: str, model_vocab: int, given: int | None, size: int
) -> None:
    spec = RunSpec.model_validate(
        {"data": {"tokenizer": tokenizer}, "model": {"vocab_size": model_vocab}}
    )
    assert resolve_vocab_size(spec, given) == size


@pytest.mark.parametrize("tokenizer", ["hf:folder", "bpe:0", "bpe:x", "bpe:"])
def test_unknown_vocabulary_is_refused_with_the_remedy(tokenizer: str) -> None:
    spec = RunSpec.model_validate({"data": {"tokenizer": tokenizer}})
    with pytest.raises(ConfigError, match=r"set model\.vocab_size"):
        check_run(spec)


def with_memory(memory_bytes: int) -> HardwareAssumption:
    return FAST.model_copy(update={"memory_bytes": memory_bytes})


def test_memory_without_a_limit_is_not_judged() -> None:
    report = check_run(run_spec(), hardware=FAST)
    assert report.verdict == "memory unknown"
    assert all(stage.fits is None for stage in report.stages)


def test_stage_larger_than_a_node_is_a_verdict_with_a_remedy() -> None:
    report = check_run(run_spec(), hardware=with_memory(10_000_000))
    assert report.verdict == "too big"
    assert not any(stage.fits for stage in report.stages)
    assert "use more stages" in report.findings[0]


def test_graphs_that_do_not_fit_are_recomputed_which_costs_time() -> None:
    roomy = check_run(run_spec(), hardware=with_memory(10**10))
    kept = max(stage.memory_kept_bytes for stage in roomy.stages)
    tight = check_run(run_spec(), hardware=with_memory(kept - 1))
    assert roomy.verdict == tight.verdict == "fits"
    assert not any(stage.recomputes for stage in roomy.stages)
    assert any(stage.recomputes for stage in tight.stages)
    assert tight.step_s > roomy.step_s


def test_run_that_never_recomputes_needs_room_for_all_graphs() -> None:
    roomy = check_run(run_spec(recompute="never"), hardware=with_memory(10**10))
    kept = max(stage.memory_kept_bytes for stage in roomy.stages)
    assert roomy.verdict == "fits"
    fixed = run_spec(recompute="never", cuts=roomy.cuts)
    assert check_run(fixed, hardware=with_memory(kept - 1)).verdict == "too big"


def test_run_that_always_recomputes_pays_a_third_more_arithmetic() -> None:
    auto = check_run(run_spec(), hardware=FAST).stages[0]
    always = check_run(run_spec(recompute="always"), hardware=FAST).stages[0]
    assert always.compute_s == pytest.approx(auto.compute_s * 4 / 3)


def test_slow_link_is_named_as_the_bottleneck() -> None:
    slow = FAST.model_copy(update={"link_bps": 1e6})
    assert not any("links set the pace" in w for w in check_run(run_spec(), hardware=FAST).warnings)
    assert any("links set the pace" in w for w in check_run(run_spec(), hardware=slow).warnings)


def test_one_replica_reduces_nothing() -> None:
    report = check_run(run_spec(replicas=1), hardware=FAST)
    assert report.reduce_s == 0
    assert all(stage.reduce_bytes_per_step == 0 for stage in report.stages)


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        ({"stages": 4, "replicas": 4}, "keeps at most so many of 16 nodes busy"),
        ({"boundary": "fp16"}, "lose bits in fp16"),
        ({"stages": 2, "cuts": (1,)}, "times as long as"),
    ],
)
def test_questionable_choice_gets_a_warning(pipeline: dict[str, Any], says: str) -> None:
    assert any(
        says in warning for warning in check_run(run_spec(**pipeline), hardware=FAST).warnings
    )


def test_single_stage_has_no_boundary_to_warn_about() -> None:
    report = check_run(run_spec(stages=1, replicas=1, boundary="fp16"), hardware=FAST)
    assert report.boundary_bytes_per_step == 0
    assert report.cuts == ()
    assert report.warnings == ()


def test_expected_step_is_the_cost_formula() -> None:
    report = check_run(run_spec(replicas=1), hardware=FAST)
    period = max(stage.compute_s for stage in report.stages)
    hop_s = report.forward_bytes * 8 / 1e9
    through = sum(stage.compute_s for stage in report.stages)
    assert report.step_s == pytest.approx(7 * period + through + 2 * (hop_s + 0.001))
    assert report.stages[0].flops_per_microbatch == (
        3 * 2 * costs.layer_forward_flops(RunSpec().model) * 4 * 128
    )


def test_rendered_report_shows_verdict_and_bytes() -> None:
    out = io.StringIO()
    report = check_run(run_spec(boundary="int8"), hardware=with_memory(10**10))
    Console(file=out, width=80).print(render(report))
    text = " ".join(out.getvalue().split())
    assert "…" not in text  # nothing is cut off on a narrow terminal
    assert "int8:g64" in text
    assert "1.88× less than bf16" in text
    assert "fits: every stage fits 10.0 GB" in text


def test_a_credit_costs_a_decoded_boundary_tensor_everywhere_but_on_the_first_stage() -> None:
    first, *others = check_run(run_spec(boundary="int8"), hardware=with_memory(10**10)).stages
    assert first.credit_bytes == 0
    shape = costs.boundary_shape(run_spec(boundary="int8"))
    assert {stage.credit_bytes for stage in others} == {4 * shape[0] * shape[1] * shape[2]}
