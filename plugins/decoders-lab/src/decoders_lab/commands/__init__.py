"""The commands of decoders-lab. The help imports them to read their signatures, so they import heavy modules only when they run."""

from collections.abc import Callable

from .beside import beside, load_beside
from .capacity import capacity
from .demo import demo
from .device import device
from .fresh import fresh
from .grammar import grammar
from .precision import precision
from .sampling import sampling
from .serve import serve

COMMANDS: dict[str, Callable[..., None]] = {
    "bench beside": beside, "bench load-beside": load_beside, "bench capacity": capacity,
    "bench device": device, "bench fresh": fresh, "bench grammar": grammar,
    "bench precision": precision, "bench sampling": sampling, "bench serve": serve, "train demo": demo,
}  # fmt: skip
