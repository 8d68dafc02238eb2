"""The conformance kit for authors of strategies, verifiers and grammar backends, and tiny models of many designs.

For example::

    from decoders.testing import check_backend, check_strategy, check_verifier
    check_strategy(MyStrategy())
    check_verifier(MyVerifier())
    check_backend(MyGrammarBackend())

Of the kit, only :func:`parametrize_with_checks` needs pytest.
"""

from __future__ import annotations

from .conditions import context
from .exactness import assert_same_tokens, decode, prompts, reference
from .grammars import check_backend
from .kit import CHECKS, check_strategy, checks_for, parametrize_with_checks
from .models import ARCHITECTURES, RECURRENT, UNSUPPORTED, tiny_draft, tiny_model
from .spy import Spy
from .verifiers import check_verifier
from .wrapped import Replay, ReplaySettings

__all__ = [
    "ARCHITECTURES", "CHECKS", "RECURRENT", "Replay", "ReplaySettings", "Spy", "UNSUPPORTED", "assert_same_tokens", "check_backend",
    "check_strategy", "check_verifier", "checks_for", "context", "decode", "parametrize_with_checks", "prompts", "reference",
    "tiny_draft", "tiny_model",
]  # fmt: skip
