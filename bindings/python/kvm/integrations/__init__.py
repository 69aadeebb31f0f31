# SPDX-License-Identifier: Apache-2.0
"""kvm inside of other libraries."""
