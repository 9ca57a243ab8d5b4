# SPDX-License-Identifier: Apache-2.0
"""Learned codecs: modules on both sides of a boundary that train with the model.

In a boundary spec one of them stands before the quantizer: "mapl:r=64|int8:g64". `subspace` (SSN,
arXiv 2506.01260), `mapl` (arXiv 2606.05484) and `resbm` (arXiv 2604.11947) follow their papers,
`linear` is a control; `build` makes a stage's `halves` of any of them. Their spelling and shapes
are in protocol/learned.py and learned_tensors.py.
"""
