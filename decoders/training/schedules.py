"""Learning rates by step."""

from __future__ import annotations

import math


def warmup_stable_decay(step: int, steps: int, peak: float, *, warmup_steps: int, decay_share: float) -> float:
    """Warm-up, stable, linear decay to zero over the last `decay_share` of the steps.

    The stable part does not depend on `steps`: a run can be resumed with another length and then decays earlier or later.
    """
    warmup = min(1.0, (step + 1) / warmup_steps)
    decay = min(1.0, (steps - step) / max(1.0, decay_share * steps))
    return peak * warmup * decay


def warmup_cosine(step: int, steps: int, peak: float, *, warmup_share: float) -> float:
    """Warm-up over the first `warmup_share` of the steps, and half a cosine down to zero over all of them."""
    warmup = min(1.0, (step + 1) / max(1.0, warmup_share * steps))
    return peak * warmup * 0.5 * (1 + math.cos(math.pi * step / steps))
