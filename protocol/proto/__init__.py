# SPDX-License-Identifier: Apache-2.0
"""Generated from the .proto files beside this one; `scripts/protoc` renews it."""
