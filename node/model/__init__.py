# SPDX-License-Identifier: Apache-2.0
"""The transformer, its loss and its first weights."""
