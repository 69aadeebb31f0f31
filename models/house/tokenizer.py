# SPDX-License-Identifier: Apache-2.0
"""The byte-pair tokenizer: that of examples/llama, which reads this model's weights."""
import os
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/llama"))

from bpe import DOCUMENT_START, Tokenizer, train_merges  # noqa: E402,F401
