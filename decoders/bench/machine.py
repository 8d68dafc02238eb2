"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from typing import Any

import torch
import transformers

from ..common.devices import cpu_name
from .memory import resident


def facts(device: torch.device) -> dict[str, Any]:
    """Processor, threads, device, versions and whether memory can be measured, JSON-safe."""
    from .. import __version__

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "decoders": __version__,
        "memory": resident() is not None,
    }
