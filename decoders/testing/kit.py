"""The conformance kit for strategies: checks that every strategy must pass.

Run all checks in one call, or each check as a pytest case::

    check_strategy(MyStrategy(width=3))

    @parametrize_with_checks([MyStrategy(), MyStrategy(width=3)])
    def test_strategy(strategy, check):
        check(strategy)
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transformers import PreTrainedModel

from ..strategy import Strategy
from . import checks
from .calls import check_calls_share_no_state, check_finish, check_memory, check_prompt_chunks
from .company import check_merged, check_rests, check_rows_come_and_go, check_rows_draft_apart
from .conditions import Conditions
from .drafts import check_draft_scores, check_draft_tokens_are_accepted
from .memory import kept, parts_of

Check = Callable[..., None]

#: All checks. Checks with more precise messages come first.
CHECKS: tuple[Check, ...] = (
    checks.check_class,
    checks.check_settings,
    checks.check_drafts,
    checks.check_on_device,
    checks.check_copies,
    checks.check_one_new_token,
    checks.check_report,
    checks.check_greedy_equals_transformers,
    checks.check_finished_rows_idle,
    checks.check_sampling_equals_autoregressive,
    checks.check_prefix_processors,
    checks.check_grammars,
    check_prompt_chunks,
    check_finish,
    check_memory,
    check_calls_share_no_state,
    check_merged,
    check_rests,
    check_rows_come_and_go,
    check_rows_draft_apart,
    check_draft_scores,
    check_draft_tokens_are_accepted,
)

#: Checks of token equality, which do not apply to lossy strategies (``exact = False``).
EXACT_ONLY: frozenset[Check] = frozenset(
    {
        checks.check_greedy_equals_transformers,
        checks.check_finished_rows_idle,
        checks.check_sampling_equals_autoregressive,
        checks.check_prefix_processors,
        checks.check_grammars,
        check_rows_come_and_go,
    }
)


def checks_for(strategy: Strategy | type[Strategy]) -> tuple[Check, ...]:
    """The checks that apply to a strategy: all checks, or all but :data:`EXACT_ONLY` if the strategy is lossy."""
    return tuple(check for check in CHECKS if strategy.exact or check not in EXACT_ONLY)


def check_strategy(
    strategy: Strategy | type[Strategy], *, models: Iterable[str | PreTrainedModel] | None = None, compile: bool = False,
    thorough: bool = False,
) -> None:  # fmt: skip
    """Runs all checks that apply to a strategy.

    Args:
        strategy: an instance, or a class that works with its default settings.
        models: models, or names in :data:`~decoders.testing.models.ARCHITECTURES`. Default: "llama", and "gemma2" with sliding windows.
        compile: whether the loop is compiled. A compiled loop starts more slowly, but is closer to real use.
        thorough: whether to try every combination of model, number of rows and options of ``generate``, on longer texts. Otherwise
            fewer combinations are tried, among which every pair of values occurs.

    Raises:
        AssertionError: a check failed. The message names the check and the reason.
    """
    strategy = instance(strategy)
    conditions = Conditions(tuple(models) if models is not None else Conditions().models, compile, thorough)
    for check in checks_for(strategy):
        try:
            check_alone(check, conditions, strategy)
        except Exception as error:
            reason = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            raise AssertionError(f"{strategy!r} fails {check.__name__}: {reason}") from error


def parametrize_with_checks(
    strategies: Sequence[Strategy | type[Strategy]], *, models: Iterable[str | PreTrainedModel] | None = None,
    compile: bool = False, thorough: bool = False,
) -> Any:  # fmt: skip
    """A pytest decorator: the test is called once per strategy and check, as ``test(strategy, check)``."""
    import pytest

    conditions = Conditions(tuple(models) if models is not None else Conditions().models, compile, thorough)
    cases = []
    for given in strategies:
        strategy = instance(given)
        for check in checks_for(strategy):
            bound = functools.partial(check_alone, check, conditions)
            cases.append(pytest.param(strategy, bound, id=f"{label(strategy)}-{check.__name__}"))
    return pytest.mark.parametrize("strategy, check", cases)


def check_alone(check: Check, conditions: Conditions, strategy: Strategy) -> None:
    """Runs `check` on a copy of the strategy. Then restores the state of the process (random states, default dtype and others)."""
    with kept():
        check(fresh(strategy), conditions)


def fresh(strategy: Strategy) -> Strategy:
    """A copy of `strategy` that shares the objects in its settings, such as models; `strategy` itself if it cannot be copied."""
    memo = {id(s.settings): s.settings for s in (strategy, *parts_of(strategy)) if hasattr(s, "settings")}
    try:
        return copy.deepcopy(strategy, memo)
    except Exception:  # check_copies reports it
        return strategy


def instance(strategy: Strategy | type[Strategy]) -> Strategy:
    """`strategy` itself, or an instance with default settings."""
    return strategy() if isinstance(strategy, type) else strategy


def label(strategy: Strategy) -> str:
    """A test id: the strategy's name, and its settings that differ from the defaults.

    Only values that are numbers or words are shown, because paths may differ between workers of pytest-xdist.
    """
    changed = strategy.settings.model_dump(exclude_defaults=True)
    shown = [f"{k}={v}" if isinstance(v, (int, float)) or str(v).isidentifier() else k for k, v in changed.items()]
    return strategy.name + (f"[{','.join(shown)}]" if shown else "")
