# SPDX-License-Identifier: Apache-2.0
"""How learned codecs are spelt in a boundary spec: "mapl:r=16", "resbm:b=16", "ssn:k=16"."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LearnedSpec:
    """A learned codec as the run spec names it; the modules are built from it and the model's."""

    spec: str
    """Canonical: parsing it gives an equal one."""
    width: int
    """Values per token on the wire, both legs."""


LEARNED: Mapping[str, Callable[[Sequence[str]], LearnedSpec]] = {}
"""By name, what parses the parameters after it. Raises `ConfigError` naming what would be right."""
