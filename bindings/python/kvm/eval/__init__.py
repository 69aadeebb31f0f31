# SPDX-License-Identifier: Apache-2.0
"""kvm-eval: what approximate attention, policies and codecs do to a real model.

    kvm-eval real --json results.jsonl

docs/eval.md says what is measured. Needs PyTorch and transformers (the extra `eval`)."""
