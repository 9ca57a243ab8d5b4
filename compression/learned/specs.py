# SPDX-License-Identifier: Apache-2.0
"""How learned codecs are spelt in a boundary spec: "mapl:r=16", "resbm:b=16", "ssn:k=16".

Defined in protocol/learned.py, since shapes, costs and stored state of a stage depend on it."""

from shoal.protocol.learned import LEARNED, LearnedSpec

__all__ = ["LEARNED", "LearnedSpec"]
