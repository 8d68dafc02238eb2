"""The variants of the CPU's kernels that this machine can run, and which are quick: each is compiled for half a minute."""

from __future__ import annotations

import os

from decoders.engine.model.kernels import cpu
from decoders.engine.model.kernels.cpu import build
from decoders.engine.model.torch_compat import has_instructions

from ....turns import slow_but

VARIANTS = [variant for variant in build.variants() if has_instructions(variant)]
#: Quick is the one on which everything else runs: the best, or that which DECODERS_CPU_KERNELS names.
IN_TURN = slow_but(
    [variant for variant in [os.environ.get(cpu.VARIABLE)] if variant in VARIANTS] or VARIANTS[:1], VARIANTS
)
