"""Which settings clients may set: those with few values, unless the operator says otherwise."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from decoders.errors import SettingsError
from decoders.server.client_settings import ClientSettings
from decoders.server.refusals import Refusal

ROUTE = "/v1/completions"


@pytest.mark.parametrize(
    "given, strategy, config, wrong",
    [
        (["bounded"], "suffix", {"alpha": 2.0, "nodes": 8}, None),
        (["bounded"], "suffix", {"remember": 10}, "remember"),
        (["bounded"], "prompt_lookup+suffix", {"suffix": {"alpha": 2.0, "remember": 10**12}}, "suffix.remember"),
        (["bounded"], "token_recycling", {"tree": [[0]]}, "tree"),
        (["bounded"], "auto", {"config": {"suffix": {"remember": 10**12}}}, "config"),
        (["bounded", "suffix.remember=0..1000"], "suffix", {"remember": 1000, "alpha": 2.0}, None),
        (["bounded", "suffix.remember=0..1000"], "suffix", {"remember": 1001}, "remember"),
        (["bounded", "suffix.remember=0..1000"], "suffix", {"remember": "x"}, "remember"),
        (["suffix.remember"], "suffix", {"remember": 10**6}, None),
        (["suffix.remember"], "suffix", {"alpha": 2.0}, "alpha"),
        (["none"], "prompt_lookup", {"max_ngram": 3}, "max_ngram"),
    ],
)
def test_what_may_be_set(given: list[str], strategy: str, config: dict[str, Any], wrong: str | None) -> None:
    allowed = ClientSettings(given)
    if wrong is None:
        allowed.check(strategy, config)
        return
    with pytest.raises(Refusal) as raised:
        allowed.check(strategy, config)
    assert raised.value.param == f"strategy_config.{wrong}" and raised.value.status == 400


@pytest.mark.parametrize(
    "given, words",
    [
        (["everything"], "takes bounded, none"),
        (["sufix.alpha"], "Did you mean 'suffix'"),
        (["suffix.alfa"], "Did you mean 'alpha'"),
        (["suffix.remember=10"], "MIN..MAX"),
        (["suffix.remember=5..2"], "MIN..MAX"),
        (["medusa.heads"], "may name files"),
        (["none", "suffix.alpha"], "lets clients set nothing"),
    ],
)
def test_what_an_operator_gets_wrong_is_said(given: list[str], words: str) -> None:
    with pytest.raises(Exception, match=words) as raised:
        ClientSettings(given)
    assert isinstance(raised.value, SettingsError) or "Did you mean" in str(raised.value)


def test_the_command_says_so_before_a_model_is_loaded() -> None:
    from typer.testing import CliRunner

    from decoders.cli import app

    result = CliRunner().invoke(app, ["serve", "no-model", "--client-settings", "suffix.alfa"])
    assert result.exit_code == 2 and "alpha" in result.output


@pytest.mark.parametrize("key, variable", [("", None), ("  ", None), (None, ""), (None, "  ")])
def test_an_empty_key_opens_no_server(key: str | None, variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from decoders.cli import app

    monkeypatch.delenv("DECODERS_API_KEY", raising=False)
    environment = {} if variable is None else {"DECODERS_API_KEY": variable}
    more = [] if key is None else ["--api-key", key]
    result = CliRunner(env=environment).invoke(app, ["serve", "no-model", *more])
    assert result.exit_code == 2 and "key" in result.output, result.output


def test_memory_does_not_grow_with_settings(service_of: Any) -> None:
    """What a scheduler held is freed with it, whatever the collector does."""
    import gc

    from decoders.engine.decode.session import Session

    def pools() -> int:
        return sum(isinstance(each, Session) for each in gc.get_objects())

    service = service_of(schedulers=2)
    gc.collect()
    gc.disable()
    try:
        before = pools()
        for number in range(12):
            config = {"alpha": 1.0 + number / 100}
            service.pool.submit("suffix", config, [5, 6, 7], lambda _: None, max_new_tokens=3).result(60)
        assert pools() - before <= 2
    finally:
        gc.enable()
        service.close()


def test_a_scheduler_that_an_error_has_ended_is_replaced(served: Any, service_of: Any, monkeypatch: Any) -> None:
    from decoders.scheduling.scheduler import Scheduler

    service = service_of()
    with served(service) as client:
        body = {"prompt": "a", "max_tokens": 2}
        assert client.post(ROUTE, json=body).status_code == 200

        def broken(self: Scheduler) -> None:
            raise RuntimeError("out of luck")

        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "_round", broken)
            assert client.post(ROUTE, json=body).status_code >= 500
        assert client.post(ROUTE, json=body).status_code == 200
