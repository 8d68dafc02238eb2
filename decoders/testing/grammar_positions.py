"""Checks of what matchers say where they are: masks, ends, what is forced, and the same by numbers."""

from __future__ import annotations

from ..constraints import Tabulated, unpack
from .grammar_case import STEPS, GrammarCase, mask, takes
from .languages import STOPPED


def check_special_tokens(case: GrammarCase) -> None:
    """Nothing that stands for no text is ever legal, but a stop token where the text may end."""
    silent = {token for token, text in enumerate(case.vocabulary.tokens) if text is None}
    for matcher, state, taken in case.walks():
        allowed = set(case.vocabulary.stops) if case.reference.ends(state) else set()
        wrong = sorted((mask(matcher) & silent) - allowed)
        assert not wrong, f"after {case.told(taken)}: tokens {wrong[:8]} stand for no text, and are legal"


def check_masks(case: GrammarCase) -> None:
    """The mask holds the legal tokens, exactly those that advance() takes; after the end it holds the stop tokens."""
    everything = range(len(case.vocabulary))
    for matcher, state, taken in case.walks():
        where = f"after {case.told(taken)}"
        want, got = set(case.legal(matcher, state)), mask(matcher)
        if state == STOPPED:
            want = set(case.vocabulary.stops)
        wrong = sorted(want ^ got)[:8]
        missing = [token for token in wrong if token in want]
        assert not wrong, f"{where}: the mask lacks {case.told(missing)} and has {case.told(sorted(got - want)[:8])}"
        taken_alone = {token for token in everything if takes(matcher, token)}
        wrong = sorted(taken_alone ^ (set() if state == STOPPED else got))
        assert not wrong, f"{where}: advance() and the mask say different things of {case.told(wrong[:8])}"
        assert matcher.accepting == case.reference.ends(state), f"{where}: accepting is {matcher.accepting}"


def check_ends(case: GrammarCase) -> None:
    """No dead ends: some token is legal everywhere, and every position can be brought to an end."""
    single = case.vocabulary.ids
    for matcher, state, taken in case.walks(steps=2 * STEPS):
        assert mask(matcher), f"after {case.told(taken)}: no token is legal"
        if state == STOPPED or case.grammar.policy != "full":
            continue
        ending = [single[bytes([byte])] for byte in case.reference.ending(state)]
        other = case.after(taken)
        assert other.advance([*ending, case.vocabulary.stops[-1]]) == len(ending) + 1, (
            f"after {case.told(taken)}: the text cannot be ended by {case.told(ending)}"
        )
        assert other.accepting, "a stop token was taken, but accepting is False"


def check_forced(case: GrammarCase) -> None:
    """Forced bytes are all that every continuation begins with; forced tokens are how the tokenizer writes them."""
    for matcher, state, taken in case.walks():
        where, forced = f"after {case.told(taken)}", matcher.forced_bytes()
        want = case.reference.forced(state)
        assert want.startswith(forced), f"{where}: {forced!r} is not forced, only {want!r} is"
        # Up to the end of a character: a backend of characters may not see further.
        left = want[len(forced) :]
        assert len(left) < 4 and not any(byte < 0x80 for byte in left), (
            f"{where}: {want!r} is forced, not only {forced!r}"
        )
        tokens = case.vocabulary.written(forced, 99, case.grammar.policy)
        count = matcher.advance(tokens)
        assert count == len(tokens), f"{where}: forced tokens {case.told(tokens)} are illegal"
        matcher.rollback(count)
        text = case.vocabulary.spell(tokens)
        assert forced.startswith(text), f"{where}: forced tokens spell {text!r}, the forced bytes are {forced!r}"
        if tokens:
            rest = case.reference.ending(case.reference.after(state, text))
            whole = list(case.vocabulary.encode((text + rest).decode()))
            # Some tokenizers put a blank in front, or see special tokens.
            if case.vocabulary.spell(whole) != text + rest:
                continue
            assert whole[: len(tokens)] == tokens, (
                f"{where}: the tokenizer writes {text + rest!r} as {whole}, the forced tokens are {tokens}"
            )


def check_tables(case: GrammarCase) -> None:
    """A grammar that is walked by numbers gives the matcher's masks and steps, by its tensors too."""
    grammar = case.grammar
    if not isinstance(grammar, Tabulated):
        return
    tables = grammar.tables()
    assert tables.nbytes > 0, "tables of no size"
    assert int(tables.next[0].abs().max()) == 0, "state 0 must be dead: all bytes lead back to it"
    for matcher, state, taken in case.walks():
        if state == STOPPED:
            continue
        state_number = grammar.first
        for token in taken:
            state_number = grammar.step(state_number, token)
        forced = grammar.forced_bytes(state_number)
        assert forced == matcher.forced_bytes(), f"after {case.told(taken)}: {forced!r} is forced by its number"
        row = unpack(tables.masks[grammar.mask_rows[state_number]], len(case.vocabulary)).nonzero().flatten().tolist()
        assert set(row) == mask(matcher), f"after {case.told(taken)}: the mask by its number is not the matcher's"
        state_number = tables.start
        for byte in case.vocabulary.spell(taken):
            state_number = int(tables.next[state_number, tables.classes[byte]])
        row = unpack(tables.masks[tables.mask_of[state_number]], len(case.vocabulary)).nonzero().flatten().tolist()
        assert set(row) == mask(matcher), f"after {case.told(taken)}: the tables' mask is not the matcher's"
