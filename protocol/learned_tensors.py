# SPDX-License-Identifier: Apache-2.0
"""The parameters that a learned codec gives to the stages beside its boundaries.

    boundary.P.encoder.I.weight   of the stage before boundary P
    boundary.P.decoder.I.weight   of the stage after it
    boundary.P.projection         of both: mirrored, the same bits on either side
    anchors.S.weight              of stage S

Shapes: D dim, R width on the wire, V vocabulary, M a bottleneck's inner width.
"""

from shoal.protocol.learned import LearnedSpec, LinearSpec, MaplSpec, ResbmSpec, SubspaceSpec

Named = tuple[str, tuple[int, ...]]


def bottleneck_width(width: int) -> int:
    """Inner width of a boundary-form ResBM's encoder and decoder: max(4b, 64)."""
    return max(4 * width, 64)


def sender_tensors(learned: LearnedSpec, boundary: int, dim: int) -> list[Named]:
    """Parameters of the half before `boundary`, in canonical order."""
    b = learned.width
    match learned:
        case LinearSpec():
            shapes = [(b, dim)]
        case ResbmSpec(form="boundary"):
            inner = bottleneck_width(b)
            shapes = [(inner, dim), (b, inner)]
        case ResbmSpec(identity=True):
            shapes = [(b, dim)]
        case ResbmSpec():
            shapes = [(b, dim), (b, b)]
        case _:
            return _projection(learned, boundary, dim)
    return [(f"boundary.{boundary}.encoder.{i}.weight", shape) for i, shape in enumerate(shapes)]


def receiver_tensors(learned: LearnedSpec, boundary: int, dim: int) -> list[Named]:
    """Parameters of the half after `boundary`, in canonical order."""
    b = learned.width
    match learned:
        case ResbmSpec(form="boundary"):
            inner = bottleneck_width(b)
            shapes = [(inner, b), (dim, inner)]
        case LinearSpec() | ResbmSpec():
            shapes = [(dim, b)]
        case _:
            return _projection(learned, boundary, dim)
    return [(f"boundary.{boundary}.decoder.{i}.weight", shape) for i, shape in enumerate(shapes)]


def anchor_tensors(learned: LearnedSpec, stage: int, *, dim: int, vocab_size: int) -> list[Named]:
    """Parameters of a stage beside any boundary that belong to neither half."""
    if not isinstance(learned, MaplSpec) or learned.anchors not in ("factorized", "full"):
        return []
    rank = dim if learned.anchors == "full" else learned.anchor_rank(dim)
    return [(f"anchors.{stage}.weight", (vocab_size, rank))]


def has_projection(learned: LearnedSpec | None) -> bool:
    """Whether boundaries have a mirrored parameter."""
    return isinstance(learned, MaplSpec) and learned.projection != "fixed"


def projection_name(boundary: int) -> str:
    return f"boundary.{boundary}.projection"


def is_projection(name: str) -> bool:
    return name.startswith("boundary.") and name.endswith(".projection")


def residual_width(learned: LearnedSpec | None, dim: int, *, is_last_stage: bool) -> int:
    """Outputs of the embedding and of every matrix that writes into the residual stream. In a
    reparametrized subspace network they are coordinates in the subspace, except on the last stage:
    no boundary follows it."""
    if isinstance(learned, SubspaceSpec) and learned.variant == "reparam" and not is_last_stage:
        return learned.width
    return dim


def frozen_elements(learned: LearnedSpec | None, *, dim: int, vocab_size: int) -> int:
    """At most so many fp32 values a stage beside a boundary holds that are no parameters: they are
    drawn from the seed."""
    match learned:
        case SubspaceSpec():
            return vocab_size * dim + dim * learned.width
        case MaplSpec():
            projections = 2 * dim * learned.width if learned.projection == "fixed" else 0
            match learned.anchors:
                case "static":
                    return projections + vocab_size * dim
                case "factorized":
                    return projections + learned.anchor_rank(dim) * dim
            return projections
    return 0


def _projection(learned: LearnedSpec, boundary: int, dim: int) -> list[Named]:
    if not has_projection(learned):
        return []
    return [(projection_name(boundary), (dim, learned.width))]
