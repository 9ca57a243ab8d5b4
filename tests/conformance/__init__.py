# SPDX-License-Identifier: Apache-2.0
"""One abstract suite per interface, run over every implementation."""
