# SPDX-License-Identifier: Apache-2.0
"""How learned codecs are spelt in a boundary spec, and what they say about themselves.

    mapl:r=R [:ra=RANK] [:anchors=factorized|full|static|none] [:proj=spel|fixed|unaware]
             [:grad=full|encoder_only]
    resbm:b=B [:form=boundary|iota] [:identity=on|off]
    ssn:k=K [:variant=reparam|projected]
    linear:b=B

The first choice is the default. The modules are in compression/learned/; here is only what shapes,
costs and stored state depend on. Residual vector quantization ("mapl:r=16:vq=…") will be one more
option of `MaplSpec`, with codebooks as one more mirrored tensor.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from shoal.protocol.errors import ConfigError

PROJECTION_LR_RATIO = 0.1
"""The rate of MAPL's projections over that of the matrices (arXiv 2606.05484)."""
MAX_PROJECTION_LR = 0.5
"""SPEL's retraction converges for steps of up to this spectral norm."""

_MAX_WIDTH = 1 << 20


@dataclass(frozen=True, slots=True)
class LearnedSpec:
    """A learned codec as the run spec names it; equal specs give equal modules."""

    spec: str
    """Canonical: parsing it gives an equal one."""
    width: int
    """Values per token on the wire, both legs."""

    @property
    def needs_token_ids(self) -> bool:
        """Whether a stage beside a boundary reads the microbatch's token ids."""
        return False

    def check(self, dim: int) -> None:
        """Raises `ConfigError` where the codec doesn't fit a residual stream of width `dim`."""
        if self.width > dim:
            raise ConfigError(
                f"{self.width} values per token from a stream of model.dim = {dim}; choose at "
                f"most {dim}, or no learned codec"
            )


@dataclass(frozen=True, slots=True)
class LinearSpec(LearnedSpec):
    """An encoder and a decoder matrix without anything else; a control."""


@dataclass(frozen=True, slots=True)
class SubspaceSpec(LearnedSpec):
    """Subspace networks (Protocol Models, arXiv 2506.01260)."""

    variant: Literal["reparam", "projected"] = "reparam"

    @property
    def needs_token_ids(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class MaplSpec(LearnedSpec):
    """A projection on the Stiefel manifold per boundary, token anchors per stage (arXiv
    2606.05484)."""

    rank: int | None = None
    anchors: Literal["factorized", "full", "static", "none"] = "factorized"
    projection: Literal["spel", "fixed", "unaware"] = "spel"
    gradient: Literal["full", "encoder_only"] = "full"

    @property
    def needs_token_ids(self) -> bool:
        return self.anchors != "none"

    def anchor_rank(self, dim: int) -> int:
        """Of factorized anchors. The paper's rank is the width that it sends, 256 of 1,024 to
        2,048. Anchors cost no bytes on the wire, hence they don't shrink with a smaller width."""
        return self.rank or max(self.width, min(256, dim // 4))

    def check(self, dim: int) -> None:
        LearnedSpec.check(self, dim)
        if self.anchors == "factorized" and self.anchor_rank(dim) > dim:
            raise ConfigError(
                f"anchors of rank {self.rank} in a stream of model.dim = {dim}; choose ra of at "
                f"most {dim}, or anchors=full"
            )


@dataclass(frozen=True, slots=True)
class ResbmSpec(LearnedSpec):
    """A residual bottleneck (arXiv 2604.11947)."""

    form: Literal["boundary", "iota"] = "boundary"
    identity: bool = True


# ---- spelling ----------------------------------------------------------------------------


def learned_codec(boundary: str) -> LearnedSpec | None:
    """The learned codec within a run's boundary spec, None where there is none. Raises
    `ConfigError` for bad parameters; the rest of the spec is compression/registry.py's to judge."""
    return _find(boundary)


@functools.lru_cache(maxsize=64)
def _find(boundary: str) -> LearnedSpec | None:
    for chain in boundary.split(";"):
        for codec in re.sub(r"^\s*(fwd|bwd)\s*=", "", chain).split("|"):
            name, *parameters = (part.strip() for part in codec.split(":"))
            if name in LEARNED:
                return LEARNED[name](parameters)
    return None


Choices = tuple[str, ...]


def _parse(
    name: str, width: str, options: Mapping[str, Choices | None], parameters: Sequence[str]
) -> tuple[str, int, dict[str, str]]:
    """(canonical spelling, width, options given). An option has choices, the first of which is
    the default, or None for a positive number."""
    given: dict[str, str] = {}
    for parameter in parameters:
        key, equals, value = (part.strip() for part in parameter.partition("="))
        choices = options.get(key)
        if not equals or key in given or (key != width and key not in options):
            raise _unknown(name, width, options, parameter)
        if choices is None:
            if not re.fullmatch(r"[0-9]{1,7}", value) or not 0 < int(value) <= _MAX_WIDTH:
                raise ConfigError(
                    f"{name}: {key} = {value!r} must be a whole number from 1 to {_MAX_WIDTH}"
                )
            value = str(int(value))
        elif value not in choices:
            raise ConfigError(f"{name}: {key} = {value!r} must be one of {', '.join(choices)}")
        given[key] = value
    if width not in given:
        raise ConfigError(
            f"{name} needs {width}=N, the values per token on the wire, such as '{name}:{width}=16'"
        )
    spelt = [f"{width}={given[width]}"]
    for key, choices in options.items():
        if key in given and not (choices and given[key] == choices[0]):
            spelt.append(f"{key}={given[key]}")
    return ":".join([name, *spelt]), int(given[width]), given


def _unknown(
    name: str, width: str, options: Mapping[str, Choices | None], parameter: str
) -> ConfigError:
    known = [f"{width}=N"]
    known += [f"{key}={'|'.join(choices) if choices else 'N'}" for key, choices in options.items()]
    return ConfigError(f"{name} takes {', '.join(known)}, each once; got {parameter[:40]!r}")


_MAPL: Mapping[str, Choices | None] = {
    "ra": None,
    "anchors": ("factorized", "full", "static", "none"),
    "proj": ("spel", "fixed", "unaware"),
    "grad": ("full", "encoder_only"),
}
_RESBM: Mapping[str, Choices | None] = {"form": ("boundary", "iota"), "identity": ("on", "off")}
_SSN: Mapping[str, Choices | None] = {"variant": ("reparam", "projected")}


def _mapl(parameters: Sequence[str]) -> LearnedSpec:
    spec, width, given = _parse("mapl", "r", _MAPL, parameters)
    anchors = given.get("anchors", "factorized")
    if "ra" in given and anchors != "factorized":
        raise ConfigError(f"mapl: ra is the rank of factorized anchors, not of anchors={anchors}")
    projection = given.get("proj", "spel")
    if "grad" in given and projection == "fixed":
        raise ConfigError("mapl: grad says how the projection learns; with proj=fixed it doesn't")
    return MaplSpec(
        spec,
        width,
        rank=int(given["ra"]) if "ra" in given else None,
        anchors=cast(Literal["factorized", "full", "static", "none"], anchors),
        projection=cast(Literal["spel", "fixed", "unaware"], projection),
        gradient=cast(Literal["full", "encoder_only"], given.get("grad", "full")),
    )


def _resbm(parameters: Sequence[str]) -> LearnedSpec:
    spec, width, given = _parse("resbm", "b", _RESBM, parameters)
    return ResbmSpec(
        spec,
        width,
        form=cast(Literal["boundary", "iota"], given.get("form", "boundary")),
        identity=given.get("identity", "on") == "on",
    )


def _ssn(parameters: Sequence[str]) -> LearnedSpec:
    spec, width, given = _parse("ssn", "k", _SSN, parameters)
    variant = cast(Literal["reparam", "projected"], given.get("variant", "reparam"))
    return SubspaceSpec(spec, width, variant=variant)


def _linear(parameters: Sequence[str]) -> LearnedSpec:
    spec, width, _ = _parse("linear", "b", {}, parameters)
    return LinearSpec(spec, width)


LEARNED: Mapping[str, Callable[[Sequence[str]], LearnedSpec]] = {
    "mapl": _mapl,
    "resbm": _resbm,
    "ssn": _ssn,
    "linear": _linear,
}
"""By name, what parses the parameters after it. Raises `ConfigError` naming what would be right."""
