"""Where Triton's kernels run in tests: in its interpreter on CPU tensors, or on a GPU."""

from __future__ import annotations

import os

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
