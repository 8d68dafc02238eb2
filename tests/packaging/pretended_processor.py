"""Makes pytest run as on a processor with AVX-512's products of bfloat16 and AMX, for kernels that were compiled with ``emulated.h``.

python -m pytest -p tests.packaging.pretended_processor
"""

from __future__ import annotations

import torch


def pytest_configure() -> None:
    for name in ("_is_avx512_bf16_supported", "_init_amx"):
        setattr(torch.cpu, name, lambda: True)
