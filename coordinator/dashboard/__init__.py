# SPDX-License-Identifier: Apache-2.0
"""What people look at: the run as JSON, as metrics and as a page."""
