# SPDX-License-Identifier: Apache-2.0
"""Real processes on this machine's loopback, held against the truth."""
