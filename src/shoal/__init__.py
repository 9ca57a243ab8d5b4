# SPDX-License-Identifier: Apache-2.0
"""Shoal: strangers train one language model together, on the GPUs in their homes."""

from shoal.version import __version__

__all__ = ["__version__"]
