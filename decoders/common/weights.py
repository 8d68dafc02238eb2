"""Small networks beside a target, read from a folder: config, weights, and whether these fit each other. No code in files is run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import SettingsError

Network = TypeVar("Network", bound=nn.Module)
#: Name, time and size of files: what has changed is read again.
Stamp = tuple[tuple[str, int, int], ...]


def stamp_of(files: Iterable[Path]) -> Stamp:
    """Of those that are there."""
    return tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.is_file())


def read_json(path: Path, missing: str, owner: str) -> Any:
    """What a file holds.

    Args:
        missing: what is said if it cannot be read: "there is no head at …".
        owner: the strategy, for messages.

    Raises:
        SettingsError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{owner}: {missing}: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{owner}: {path} is no JSON: {error}") from error


def read_tensors(path: Path, owner: str) -> dict[str, Tensor]:
    """Weights by name, on the CPU: of a safetensors file, or of a pickle that torch's ``weights_only`` loader reads.

    Raises:
        SettingsError: they cannot be read, or are no mapping of names to tensors.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged file raises is up to the reader
        raise SettingsError(f"{owner}: {path} cannot be read: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise SettingsError(f"{owner}: {path} holds a {type(state).__name__}, which is no mapping of names to tensors")
    return state


def filled(
    network: Network, state: dict[str, Tensor], place: Path, owner: str, device: torch.device, dtype: torch.dtype
) -> Network:
    """`network` with the weights of `state`, frozen and ready to draft.

    Args:
        place: where they come from, for messages.

    Raises:
        SettingsError: they are others than its config says.
    """
    expected = network.state_dict()
    wrong = sorted(
        [f"{name} is missing" for name in expected.keys() - state.keys()]
        + [f"{name} has no place" for name in state.keys() - expected.keys()]
        + [
            f"{name} is {list(state[name].shape)}, not {list(tensor.shape)}"
            for name, tensor in expected.items()
            if name in state and state[name].shape != tensor.shape
        ]
    )
    if wrong:
        raise SettingsError(f"{owner}: the weights in {place} are not those of its config: {'; '.join(wrong[:4])}")
    network.load_state_dict(state)
    network.requires_grad_(False)
    return network.to(device=device, dtype=dtype).eval()
