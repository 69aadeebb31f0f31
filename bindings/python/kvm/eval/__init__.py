# SPDX-License-Identifier: Apache-2.0
"""kvm-eval: what approximate attention, policies and codecs do to a real model.

    kvm-eval real --json results.jsonl       a real model over texts
    kvm-eval tasks --prompts 1000            tasks of the house model
    kvm-eval heads smollm2 --out smollm2.heads
                                             which heads retrieve
    kvm-eval record text.kvrec               records queries, keys and values of a model
    kvm-eval tensors text.kvrec              what each mode answers over them
    kvm-eval plot results.jsonl -o q.svg     quality against bytes

docs/eval.md says what is measured. Needs PyTorch and transformers (the extra `eval`)."""
