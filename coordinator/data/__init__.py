# SPDX-License-Identifier: Apache-2.0
"""From text to content-addressed token shards, once per run, at launch."""
