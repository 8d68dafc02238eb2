"""Finds the replica that has already read the beginning of a prompt."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

#: Number of tokens, or of characters of a text, per block: prompts are compared block by block.
BLOCK = 16
#: Greatest number of blocks that are remembered; the least recently used are dropped.
BLOCKS = 200_000


class PrefixTable:
    """Remembers which replica received which prompt. Every router has its own table. For unknown prompts, all routers choose alike.

    Args:
        block: number of tokens per block.
        blocks: greatest number of blocks to remember.
    """

    def __init__(self, block: int = BLOCK, blocks: int = BLOCKS) -> None:
        self.block, self.blocks = block, blocks
        self._holders: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, prompt: Sequence[int] | str, replica: str) -> None:
        """Remembers that `replica` received `prompt`."""
        for key in self._keys(prompt):
            self._holders.pop(key, None)
            self._holders[key] = replica
        while len(self._holders) > self.blocks:
            self._holders.popitem(last=False)

    def ranked(self, prompt: Sequence[int] | str, queues: Mapping[str, int], slack: int) -> list[str]:
        """The replicas, the best first: the replica that has read most of `prompt`, then the others, ordered by a hash of the
        prompt's first block (by queue length if the prompt is shorter than a block). Busy replicas come last.

        Args:
            queues: number of requests of each replica.
            slack: a replica is busy if it exceeds the least busy replica by more than this number of requests.
        """
        if not queues:
            return []
        least = min(queues.values())
        prefers = [replica for replica, length in queues.items() if length <= least + slack]
        first = next(self._keys(prompt), b"")
        order = sorted(prefers, key=lambda replica: _weight(first, replica), reverse=True)
        holder = self._holder(prompt, set(prefers))
        if holder is not None:
            order.remove(holder)
            order.insert(0, holder)
        elif not first:  # the prompt has no whole block
            order = sorted(prefers, key=lambda replica: (queues[replica], random.random()))
        return order + sorted(set(queues) - set(prefers), key=lambda replica: (queues[replica], replica))

    def forget(self, replicas: Iterable[str]) -> None:
        """Forgets the prompts of lost replicas."""
        gone = set(replicas)
        for key in [key for key, replica in self._holders.items() if replica in gone]:
            del self._holders[key]

    def _holder(self, prompt: Sequence[int] | str, among: set[str]) -> str | None:
        """Of the replicas `among`, the one that has read the longest beginning of `prompt`; None if none has read a block."""
        best = None
        for key in self._keys(prompt):
            replica = self._holders.get(key)
            if replica is None:
                break
            if replica in among:
                best = replica
        return best

    def _keys(self, prompt: Sequence[int] | str) -> Iterator[bytes]:
        """Yields a key per whole block: a hash of the prompt up to the block's end."""
        digest = hashlib.blake2b(digest_size=16)
        for end in range(self.block, len(prompt) + 1, self.block):
            digest.update(repr(prompt[end - self.block : end]).encode())
            yield digest.digest()


def _weight(key: bytes, replica: str) -> bytes:
    """The weight of a replica for a key, for rendezvous hashing: if a replica is lost, only its prompts go to other replicas."""
    return hashlib.blake2b(key + replica.encode(), digest_size=8).digest()
