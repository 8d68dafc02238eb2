"""The data that the decoding loop shows to a strategy: the committed rows, a verified step, and a chunk of the prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .common.host_reads import host_reads


@dataclass(frozen=True)
class Sequences:
    """The committed rows as device tensors. The loop updates them in place between steps.

    Attributes:
        tokens: ``[B, L]`` int64, prompt and output from slot 0 on, undefined after a row's length. ``L`` is at least the length of
            the longest row, and may grow from step to step. -1 marks prompt positions without a token id: the caller gave a cache
            (``past_key_values``) or vectors (``inputs_embeds``) for them, or they belong to the soft prompt of an adapter.
        length: ``[B]`` int64, number of committed tokens per row.
        prompt_length: ``[B]`` int64, number of prompt tokens per row.
        finished: ``[B]`` bool, rows that have ended.
        noise_keys: ``[B]`` int64, keys of the noise for drafts (:func:`decoders.sampling.gumbel_noise`). With the coupled verifier,
            the target draws with the same keys. With other verifiers, every step has new keys.
        known: the rows as lists, for :meth:`read`; None if the loop has not read them from the device.
    """

    tokens: Tensor
    length: Tensor
    prompt_length: Tensor
    finished: Tensor
    noise_keys: Tensor
    known: HostRows | None = None

    @property
    def last(self) -> Tensor:
        """``[B, 1]`` int64, the last committed token of each row. It is node 0 (the root) of the next step."""
        return self.tokens.gather(1, self.length[:, None] - 1)

    @property
    def on_host(self) -> bool:
        """Whether Python can read the rows and the step without a sync: on a CPU, except while a step is recorded (CUDA graphs)."""
        return host_reads(self.length)

    def read(self) -> HostRows:
        """The rows as lists, for strategies that work on the host.

        Waits for the device if the loop has not read the rows: in :meth:`Strategy.start`, and in a strategy that drafts for a draft
        model or declares ``on_device``.
        """
        return HostRows.of(self) if self.known is None else self.known


@dataclass(frozen=True)
class HostRows:
    """The rows of a :class:`Sequences` as lists.

    Attributes:
        lengths: number of committed tokens per row.
        prompt_lengths: number of prompt tokens per row.
        finished: whether each row has ended.
        tokens_from: takes a slot, and returns every row's tokens from this slot up to `lengths`. Tokens committed later are not
            included.
    """

    lengths: list[int]
    prompt_lengths: list[int]
    finished: list[bool]
    tokens_from: Callable[[int], list[list[int]]]

    @staticmethod
    def of(sequences: Sequences) -> HostRows:
        """Returns the rows as lists. Reads lengths and finished flags from the device now, and tokens when `tokens_from` is called."""
        figures = torch.stack([sequences.length, sequences.prompt_length, sequences.finished.long()])
        lengths, prompts, ended = figures.tolist()

        def tokens_from(first: int) -> list[list[int]]:
            texts = sequences.tokens[:, first : max(lengths)].tolist()
            return [text[: max(length - first, 0)] for text, length in zip(texts, lengths, strict=True)]

        return HostRows(lengths, prompts, [bool(end) for end in ended], tokens_from)


@dataclass(frozen=True)
class Step:
    """A verified draft.

    Attributes:
        nodes: ``[B, N]`` int64, the verified nodes: node 0, the draft tokens, and padding if the step has more nodes than the draft.
        chosen: ``[B, N]`` int64, the target's token after each node; -2 off the accepted path if logits processors run on the host.
        path: ``[B, N]`` int64, the accepted node at each depth; valid up to depth `accepted`.
        accepted: ``[B]`` int64, number of accepted draft tokens.
        emitted: ``[B]`` int64, number of committed tokens: the accepted draft tokens and the target's token; fewer in a row that ended.
        logits: ``[B, N, V]`` float32, the target's raw logits after each node.
        hidden: ``[B, N, H]``, the input of the output head.
        sequences: the rows with this step's tokens committed.
        own_nodes: number of nodes at the start of `nodes`, root included, that come from the strategy's draft, in the draft's order.
            None: `nodes` begins with the whole draft, and other nodes may follow. 0: no node is known to come from the draft. In
            ``"a+b"``, the limit on the joint tree's size may cut off the last nodes of every draft.
        layers: ``[B, N, T, H]``, outputs of the ``T`` decoder layers in :attr:`Strategy.hidden_layers`, in this order; None if T is
            0.
        known: the step as lists, for :meth:`read`; None if the loop has not read it from the device.
    """

    nodes: Tensor
    chosen: Tensor
    path: Tensor
    accepted: Tensor
    emitted: Tensor
    logits: Tensor
    hidden: Tensor
    sequences: Sequences
    own_nodes: int | None = None
    layers: Tensor | None = None
    known: HostStep | None = None

    def read(self) -> HostStep:
        """The committed tokens as lists. Waits for the device only in a strategy that drafts for a draft model."""
        return HostStep.of(self) if self.known is None else self.known


@dataclass(frozen=True)
class HostStep:
    """The output of a step as lists, with an entry per row.

    Attributes:
        accepted: number of accepted draft tokens.
        tokens: the committed tokens.
    """

    accepted: list[int]
    tokens: list[list[int]]

    @staticmethod
    def of(step: Step) -> HostStep:
        """Returns `step` as lists, which are copied from the device with one sync."""
        figures = torch.cat([step.accepted[:, None], step.emitted[:, None], step.chosen.gather(1, step.path)], dim=1)
        rows = figures.tolist()
        return HostStep([row[0] for row in rows], [row[2 : 2 + row[1]] for row in rows])


@dataclass(frozen=True)
class PromptChunk:
    """A chunk of the rows' prompts that the target has just read.

    The chunks of a call hold all prompt tokens except the last token of each row, which is node 0 of the first step. Prompts of one
    token have no chunks. After :meth:`Strategy.rebatch`, chunks hold the prompts of new rows. In the other rows `valid` is then False,
    and `positions` begin at the last committed token, which is not cached yet: a strategy may write its cache at all positions.

    Attributes:
        tokens: ``[B, N]`` int64.
        positions: ``[B, N]`` int64, consecutive positions in the row.
        valid: ``[B, N]`` bool, True for tokens of the prompt, False for padding after it.
        hidden, layers: ``[B, N, H]`` and ``[B, N, T, H]``, as in :class:`Step`.
        logits: ``[B, N, V]`` float32, the raw logits; None unless :attr:`Strategy.prompt_logits` is True.
    """

    tokens: Tensor
    positions: Tensor
    valid: Tensor
    hidden: Tensor
    layers: Tensor | None = None
    logits: Tensor | None = None
