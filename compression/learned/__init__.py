# SPDX-License-Identifier: Apache-2.0
"""Learned codecs, which implement `shoal.compression.codec.GraphCodec`. None is built yet.

Planned, one file each: `subspace` (activations confined to one global subspace; Protocol Models,
arXiv 2506.01260), `mapl` (a projection on the Stiefel manifold per boundary, with trainable token
anchors; arXiv 2606.05484) and `resbm` (encoder and decoder with a truncated identity around them;
arXiv 2604.11947). In a boundary spec they stand before the quantizer: "mapl:r=64|int8:g64".
"""
