"""Strategies that write the right tokens and are broken all the same: the kit says of each one, by name, what is wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import Tensor

from decoders.sampling import gumbel_noise
from decoders.settings import Settings
from decoders.strategies import PromptLookup
from decoders.strategies.merged import Merged
from decoders.strategy import Context, Draft, Sequences, Step, Strategy
from decoders.testing import CHECKS, check_strategy, checks_for, parametrize_with_checks
from decoders.testing.checks import check_on_device
from decoders.testing.memory import restore, surroundings

from .test_conformance import Good, Leaks

BY_NAME = {check.__name__: check for check in CHECKS}


def assert_caught(broken: Strategy | type[Strategy], check: str, reason: str) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)fails {check}: .*({reason})"):
        check_strategy(broken)


def check_all_but(name: str, strategy: Strategy) -> None:
    for check in checks_for(strategy):
        if check.__name__ != name:
            check(strategy)


class Repeats(Good):
    """Repeats the last token, in a state."""

    def start(self, context: Any) -> Any:
        return SimpleNamespace(best=torch.zeros(context.rows, 3, dtype=torch.int64), steps=0)

    def propose(self, state, sequences):
        state.best.copy_(sequences.last.expand(-1, 3))
        return Draft.chain(state.best.clone())


def does(hook: str, code: Any, base: type[Strategy] = Good) -> type[Strategy]:
    """`base`, but for what `code` does with what a hook is given, before the hook itself."""

    def run(self, *given):
        code(self, *given)
        return getattr(base, hook)(self, *given)

    return type(base.__name__, (base,), {hook: run})


# What outlives a call.

CountsItsCalls = does("start", lambda self, _: setattr(self, "calls", 1))
KeepsItsState = does("propose", lambda self, _, sequences: setattr(self, "last", sequences.last.clone()))


def as_lists(sequences: Sequences) -> Iterator[tuple[list[int], int, int]]:
    """Tokens, length and prompt length of every row."""
    return zip(sequences.tokens.tolist(), sequences.length.tolist(), sequences.prompt_length.tolist(), strict=True)


TEXTS: dict[tuple[int, ...], list[int]] = {}


class ReadsBeyondTheLength(Good):
    """Proposes what an earlier call has left after the row."""

    on_device = False

    def propose(self, state, sequences):
        after = sequences.length[:, None] + torch.arange(3)
        return Draft.chain(sequences.tokens.gather(1, after.clamp(max=sequences.tokens.shape[1] - 1)))


class RemembersInItsClass(Good):
    """Proposes what followed the same text in an earlier call."""

    on_device = False
    texts: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def memory(self) -> dict[tuple[int, ...], list[int]]:
        return self.texts

    def propose(self, state, sequences):
        memory, rows = self.memory(), []
        for tokens, length, prompt in as_lists(sequences):
            known, new = memory.get(tuple(tokens[:prompt]), []), length - prompt
            rows.append((known[new : new + 3] + [tokens[length - 1]] * 3)[:3])
        return Draft.chain(torch.tensor(rows))

    def observe(self, state, step: Step) -> None:
        for tokens, length, prompt in as_lists(step.sequences):
            self.memory()[tuple(tokens[:prompt])] = tokens[prompt:length]


class RemembersInItsModule(RemembersInItsClass):
    def memory(self):
        return TEXTS


class RemembersInADefault(RemembersInItsClass):
    def memory(self, texts={}):  # noqa: B006
        return texts


COUNT = [0]


class CountsInItsClass(Good):
    calls = 0

    def start(self, context):
        type(self).calls += 1


class LearnsForEver(Good):
    """Keeps the successor of each token in a tensor of its module."""

    on_device = False

    def propose(self, state, sequences):
        return Draft.chain(SUCCESSORS[sequences.last])

    def observe(self, state, step: Step) -> None:
        SUCCESSORS[step.nodes[:, 0]] = step.chosen[:, 0]


SUCCESSORS = torch.full((128,), 3)


class CountsInItsModule(Good):
    """Draft tokens well in the first calls of the process only: no second call differs from the first one."""

    def start(self, context):
        COUNT[0] += 1

    def propose(self, state, sequences):
        draft = super().propose(state, sequences)
        return draft if COUNT[0] < 3 else Draft.chain(draft.tokens)


class OneGenerator(Good):
    on_device = False
    noise = torch.Generator().manual_seed(0)

    def propose(self, state, sequences):
        return Draft.chain(torch.randint(3, 100, sequences.last.shape, generator=self.noise).expand(-1, 3))


@pytest.mark.parametrize(
    ("broken", "check", "reason"),
    [
        (CountsItsCalls, "check_drafts", "start changed its instance: calls is new"),
        (KeepsItsState, "check_drafts", "propose changed its instance: last is new"),
        (Leaks, "check_drafts", "start changed its instance: calls was 0 and is 1; so state leaks"),
        (RemembersInItsClass, "check_calls_share_no_state", "state leaks from call to call"),
        (ReadsBeyondTheLength, "check_calls_share_no_state", "or a hook reads tokens beyond a row's length"),
        (RemembersInItsModule, "check_calls_share_no_state", "state leaks from call to call"),
        (RemembersInADefault, "check_calls_share_no_state", "state leaks from call to call"),
        (CountsInItsModule, "check_calls_share_no_state", r"COUNT\[0\] was \d+ and is \d+; state leaks"),
        (CountsInItsClass, "check_calls_share_no_state", r"CountsInItsClass.calls was \d+ and is \d+; state leaks"),
        (LearnsForEver, "check_calls_share_no_state", "state leaks from call to call"),
        (OneGenerator, "check_calls_share_no_state", "state leaks from call to call"),
    ],
)
def test_what_outlives_a_call(broken, check, reason):
    if check == "check_drafts":
        assert_caught(broken, check, reason)
    else:
        with pytest.raises(AssertionError, match=reason):
            BY_NAME[check](broken())


@pytest.mark.slow
@pytest.mark.parametrize("broken", [RemembersInItsModule, CountsInItsModule])
def test_what_outlives_a_call_is_found_after_other_checks(broken):
    """All checks before it have run, and warmed what can be warmed."""
    assert_caught(broken, "check_calls_share_no_state", "state leaks")


@pytest.mark.slow
@parametrize_with_checks([RemembersInItsModule()])
def test_memory_is_found_by_its_own_check_after_all_others(strategy, check, request):
    if "check_calls_share_no_state" in request.node.name:
        with pytest.raises(AssertionError, match="state leaks"):
            check(strategy)
    elif "on_device" not in request.node.name:
        check(strategy)


# What the process is left with.


@pytest.mark.parametrize("hook", ["start", "propose", "observe"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda: torch.rand(1), "torch's global random state changed; draw with"),
        (lambda: torch.manual_seed(3), "torch's global random state changed"),
        (random.random, "Python's global random state changed"),
        (np.random.rand, "NumPy's global random state changed"),
        (lambda: torch.set_default_dtype(torch.float64), "torch's default dtype changed: it was torch.float32"),
        (lambda: torch.set_grad_enabled(True), "grad mode changed: it was False"),
        (lambda: torch.set_num_threads(2), "torch's number of threads changed"),
        (lambda: torch.set_float32_matmul_precision("medium"), "the precision of float32 products changed"),
        (
            lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
            "the precision of float32 products changed",
        ),
    ],
    ids=["draws", "seeds", "random", "numpy", "dtype", "grad", "threads", "precision", "precision on CUDA"],
)
def test_what_the_process_is_left_with(hook, change, reason):
    before = surroundings()
    with pytest.raises(AssertionError, match=f"{hook} leaves {reason}"):
        BY_NAME["check_drafts"](does(hook, lambda *_: change())())
    assert not restore(before), "the kit puts back what it finds changed"


# What is written to.


class Width(Settings):
    width: int = Field(3, description="How many.")


class HasWidth(Good):
    settings_class = Width


def write_behind_the_length(self, state, sequences):
    place = sequences.length[:, None].clamp(max=sequences.tokens.shape[1] - 1)
    sequences.tokens.data.scatter_(1, place, sequences.last + 1)


def write_behind_the_length_later(self, state, step):
    tokens = step.sequences.tokens
    tokens[:, -1] = torch.where(step.sequences.length < tokens.shape[1], tokens[:, -1] + 1, tokens[:, -1])


ChangesItsSettings = does("observe", lambda self, *_: self.settings.__dict__.update(width=4), HasWidth)
WritesBehindTheLength = does("propose", write_behind_the_length)
WritesBehindTheLengthLater = does("observe", write_behind_the_length_later)
Rebinds = does("propose", lambda _, state, sequences: object.__setattr__(sequences, "length", sequences.length.clone()))
WritesInStart = does("start", lambda _, context: context.sequences.tokens[:, 0].add_(1))


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (ChangesItsSettings, "observe changed the settings: settings.width was 3 and is 4"),
        (WritesBehindTheLength, "propose wrote into `tokens` after the rows' lengths"),
        (WritesBehindTheLengthLater, "observe wrote into `tokens` after the rows' lengths"),
        (Rebinds, "propose put another tensor in the place of `length`"),
        (WritesInStart, "start changed `tokens`"),
    ],
)
def test_what_is_not_theirs_to_write_to(broken, reason):
    assert_caught(broken, "check_drafts", reason)


# What a draft says that it was drawn from.


class Drawer(Good):
    """Draws around the last token, and says so."""

    on_device = False
    length = 3

    def start(self, context):
        noise = torch.randn(context.vocab_size, generator=torch.Generator().manual_seed(1))
        return SimpleNamespace(base=noise, sample=context.plan.sample, coupled=context.coupled)

    def scores(self, state, last):
        return state.base + 4 * torch.nn.functional.one_hot(last[:, 0], len(state.base))

    def propose(self, state, sequences):
        token, tokens, scores = sequences.last, [], []
        at = sequences.length - sequences.prompt_length
        for depth in range(self.length):
            scores.append(self.scores(state, token))
            noise = gumbel_noise(sequences.noise_keys, (at + depth)[:, None], len(state.base))[:, 0]
            token = (scores[-1] + noise * state.sample).argmax(-1, keepdim=True)
            tokens.append(token)
        drawn, says = torch.cat(tokens, 1), None
        if state.sample and not state.coupled:
            says = torch.stack(scores, 1)
        return self.draft(drawn, says)

    def draft(self, tokens, scores):
        return Draft.chain(tokens, scores)


def says(change: Any) -> type[Strategy]:
    """Draws as `Drawer` does, and makes tokens and scores by `change` of what it has drawn."""

    def draft(self, tokens, scores):
        return Draft.chain(tokens) if scores is None else Draft.chain(*change(tokens, scores))

    return type("Says", (Drawer,), {"draft": draft})


def keeps_the_unlikely_back(tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    likely = scores.softmax(-1).gather(2, tokens[..., None])[..., 0] > 0.02
    return torch.where(likely.long().cumprod(1).bool(), tokens, -1), scores


def says_another_is_certain(tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    return tokens, torch.full_like(scores, -torch.inf).scatter(2, (tokens[..., None] + 1) % 128, 0.0)


HoldsNaN = says(lambda tokens, scores: (tokens, scores.where(scores < 4, torch.nan)))
SaysUniform = says(lambda tokens, scores: (tokens, torch.zeros_like(scores)))


class SaysSharper(says(lambda tokens, scores: (tokens, scores * 1.25))):
    """Has a name in this module, as a copy by pickle needs."""


NOT_DRAWN = "the draft tokens of 'good' are not drawn from Draft.scores: total variation is 0"
TOO_LITTLE = r"draft scores must be float32 \[2, 3, V\], not torch.float32 \[2, 1, 128\]"
OTHER_VOCABULARY = r"Draft.scores must be torch.float32 \[2, 3, 128\], not torch.float32 \[2, 3, 127\]"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (HoldsNaN, "Draft.scores holds NaN"),
        (says(lambda tokens, scores: (tokens, scores[:, :1])), TOO_LITTLE),
        (says(lambda tokens, scores: (tokens, scores[..., :-1])), OTHER_VOCABULARY),
        (says(lambda tokens, scores: (tokens, scores.double())), "must be float32 .*, not torch.float64"),
        (says(lambda tokens, scores: (tokens, torch.full_like(scores, -torch.inf))), "-inf for the whole vocabulary"),
        (SaysUniform, NOT_DRAWN),
        (SaysSharper, NOT_DRAWN),
        (says(lambda tokens, scores: (tokens, scores.softmax(-1))), NOT_DRAWN),
        (says(lambda tokens, scores: (tokens, scores.roll(1, 1))), NOT_DRAWN),
        (says(keeps_the_unlikely_back), NOT_DRAWN),
        (says(says_another_is_certain), "a draft token has probability 0 in Draft.scores"),
    ],
)
def test_what_a_draft_was_drawn_from(broken, reason):
    with pytest.raises(AssertionError, match=reason):
        BY_NAME["check_draft_scores"](broken())


@pytest.mark.slow
def test_such_a_strategy_passes_all_other_checks():
    check_all_but("check_draft_scores", SaysSharper())


# Waiting for the device.


def looks_inside(self, state, step):
    assert 10**6 not in step.nodes


def indexes_by_list(self, state, sequences):
    state.best.copy_(sequences.last[:, [0, 0, 0]])


ShowsATensor = does("propose", lambda self, state, sequences: repr(sequences.length), Repeats)
WAITS: list[tuple[str, Any, str]] = [
    (
        "propose",
        lambda self, _, sequences: sequences.tokens[:, : sequences.length[0]].sum(),
        "slicing up to a number that is on the device waits",
    ),
    (
        "propose",
        lambda self, _, sequences: sequences.tokens[:, sequences.length[0] - 1].sum(),
        "indexing with a number that is on the device waits",
    ),
    ("propose", indexes_by_list, "creates a tensor from data of the host"),
    ("propose", lambda *_: torch.LongTensor([1, 2, 3]), "creates a tensor from data of the host"),
    ("observe", lambda self, _, step: print(f"{step.accepted} accepted"), r"__(format|repr|str)__\(\) waits"),
    ("observe", looks_inside, r"__contains__\(\) waits"),
    ("observe", lambda self, _, step: step.accepted.to("cpu", non_blocking=True), r"to\('cpu'\) waits"),
    ("observe", lambda self, _, step: torch.arange(step.accepted[0]), "_local_scalar_dense waits"),
    ("observe", lambda self, _, step: torch.equal(step.nodes, step.chosen), r"equal\(\) waits"),
]


class WaitsAtFirst(Repeats):
    """In the first two steps only, which are not recorded."""

    def propose(self, state, sequences):
        if next(state.turns, None) is not None:
            sequences.length.sum().item()
        return super().propose(state, sequences)

    def start(self, context):
        state = super().start(context)
        state.turns = iter(range(2))
        return state


class MovesTwice(Repeats):
    """The second move of a step may land where the tensor was."""

    def propose(self, state, sequences):
        state.best = sequences.last.repeat(1, 3)
        return Draft.chain(state.best.clone())

    def observe(self, state, step):
        state.best = state.best + 0


def counts_for_nothing(self, state, step):
    state.steps += 1


def puts_another(self, state, step):
    state.steps = (state.steps, 1) if isinstance(state.steps, int) else 0


@pytest.mark.parametrize(
    ("liar", "reason"),
    [
        (ShowsATensor, r"__repr__\(\) waits"),
        *((does(hook, code, Repeats), reason) for hook, code, reason in WAITS),
        (WaitsAtFirst, r"item\(\) waits"),
        (MovesTwice, "state.best has moved"),
        (does("observe", counts_for_nothing, Repeats), "its hooks change state.steps, which a replay does not"),
        (does("observe", puts_another, Repeats), "its hooks change state.steps, which a replay does not"),
    ],
)
def test_a_promise_of_the_device_that_is_broken(liar, reason):
    with pytest.raises(AssertionError, match=f"claims on_device = True, but .*({reason})"):
        check_on_device(liar())
    check_on_device(type(liar.__name__, (liar,), {"on_device": False})())


# Never right.


class Successor(Good):
    """Sound in all respects, and wrong."""

    def propose(self, state, sequences):
        return Draft.chain((sequences.last.expand(-1, 3) + 1) % 128)


class AlwaysTheSame(Good):
    def propose(self, state, sequences):
        return Draft.chain(torch.full_like(sequences.last, 2).expand(-1, 3))


class SpoilsTheBest(PromptLookup):
    def propose(self, state, sequences):
        draft = super().propose(state, sequences)
        return Draft.chain(torch.where(draft.tokens >= 0, (draft.tokens + 1) % 128, -1))


@pytest.mark.parametrize("wrong", [Successor, AlwaysTheSame, SpoilsTheBest])
def test_never_right(wrong):
    check = BY_NAME["check_draft_tokens_are_accepted"]
    with pytest.raises(AssertionError, match=r"\d+ tokens were drafted in \d+ steps .* hardly ever right"):
        check(wrong())


# Parts of merged strategies.


class KnowsItsNodesOnly(Repeats):
    """Takes every block for its own."""

    def observe(self, state, step):
        state.best.copy_(step.nodes[:, 1:])


class KnowsTheWholeDraft(Repeats):
    """Takes the block's first nodes for the whole of its draft."""

    def observe(self, state, step):
        state.best.copy_(step.nodes[:, 1:4])


class ShortensTheRows(Good):
    name = "writes"

    def observe(self, state, step):
        step.sequences.length.data.add_(1)


def beside(part: Strategy) -> Merged:
    return Merged([PromptLookup(length=3), part])


class Named(Good):
    name = "Named"


def test_a_part_that_takes_the_block_for_its_own():
    with pytest.raises(RuntimeError, match="must match the size"):
        BY_NAME["check_merged"](KnowsItsNodesOnly())


def test_a_part_that_does_not_expect_its_draft_to_be_cut():
    with pytest.raises(RuntimeError, match="must match the size"):
        BY_NAME["check_merged"](KnowsTheWholeDraft())


@pytest.mark.slow
def test_such_a_part_passes_all_other_checks():
    check_all_but("check_merged", KnowsItsNodesOnly())


@pytest.mark.parametrize(
    ("part", "check", "reason"),
    [
        (ShortensTheRows, "check_drafts", "observe of 'writes' changed `length`"),
        (CountsItsCalls, "check_drafts", "start of 'good' changed its instance: calls"),
        (ChangesItsSettings, "check_drafts", "observe of 'good' changed the settings"),
        (WritesBehindTheLength, "check_drafts", "propose of 'good' wrote into `tokens` after"),
        (does("propose", lambda *_: torch.rand(1)), "check_drafts", "propose of 'good' leaves torch's global random"),
        (RemembersInItsModule, "check_calls_share_no_state", "state leaks"),
        (HoldsNaN, "check_draft_scores", "propose of 'good': Draft.scores holds NaN"),
        (SaysUniform, "check_draft_scores", NOT_DRAWN),
        (ShowsATensor, "check_on_device", r"propose of 'good': __repr__\(\) waits"),
        (Successor, "check_draft_tokens_are_accepted", "'good' is hardly ever right"),
        (Named, "check_class", "snake_case"),
    ],
)
def test_a_broken_part_is_named(part, check, reason):
    with pytest.raises(AssertionError, match=reason):
        BY_NAME[check](beside(part()))


@pytest.mark.slow  # what Repeats is made of passes in test_conformance.py
def test_what_the_broken_ones_are_made_of_passes():
    check_strategy(Repeats)


def test_what_draws_passes():
    BY_NAME["check_draft_scores"](Drawer())  # the others: test_such_a_strategy_passes_all_other_checks
    BY_NAME["check_calls_share_no_state"](SaysSharper())
    check_on_device(Repeats())


class KnowsItsRows(Good):
    """Drafts a token of the row's own prompt, from a state with an entry per row."""

    on_device = False
    rests = True
    given = 0  # whose entry a row takes, counted from its own

    def start(self, context: Context) -> list[int]:
        return [tokens[0] for tokens in context.sequences.tokens.tolist()]

    def propose(self, state: list[int], sequences: Sequences) -> Draft:
        rows = len(state)
        return Draft.chain(torch.tensor([[state[(row + self.given) % rows]] * 3 for row in range(rows)]))

    def rebatch(self, state: list[int], rows: Tensor, context: Context) -> list[int]:
        new = self.start(context)
        return [state[row] if row >= 0 else new[place] for place, row in enumerate(rows.tolist())]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda model: model.train(), "the mode"),
        (lambda model: model.lm_head.weight.mul_(1.0), "the weights"),
    ],
    ids=["mode", "weights"],
)
def test_what_changes_the_model_is_found(change, what):
    with pytest.raises(AssertionError, match=f"changed {what}.* of the model"):
        BY_NAME["check_drafts"](does("start", lambda _, context: change(context.model))())
    BY_NAME["check_drafts"](Good())  # meets another model


class TakesAnothers(KnowsItsRows):
    given = 1


class MixesThemUp(KnowsItsRows):
    def rebatch(self, state, rows, context):
        return super().rebatch(state, rows.flip(0), context)


@pytest.mark.slow
def test_rows_that_take_the_state_of_another_are_found():
    check = BY_NAME["check_rows_draft_apart"]
    check(KnowsItsRows())
    with pytest.raises(AssertionError, match="drafts other tokens in a batch than alone"):
        check(TakesAnothers())
    with pytest.raises(AssertionError, match=r"beside rows that join and leave \(see rebatch\) than alone"):
        check(MixesThemUp())
    BY_NAME["check_rows_come_and_go"](MixesThemUp())  # whose tokens are right all the same
