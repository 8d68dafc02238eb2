"""``decoders bench`` and ``decoders demo`` on a tiny model."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from decoders import bench
from decoders.bench.plot import check_format, plot
from decoders.bench.shapes import SHAPES
from decoders.cli import app, live, models
from decoders.cli.live import ACCEPTED, ColouredStream, show
from decoders.errors import SettingsError, UnsupportedError, amount
from decoders.prompts.reading import INSTRUCTIONS, encode, instructions, read_prompts
from decoders.report import Report
from decoders.report.figures import Timings
from decoders.settings import RuntimeSettings
from decoders.testing import tiny_model

from .conftest import TEXTS


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


BENCH = ("bench", "--no-compile", "-n", "5", "--repeats", "1", "--baseline", "transformers")
DEMO = ("demo", "--no-compile", "-n", "6", "--repeats", "1", "-s", "autoregressive", "-s", "prompt_lookup")


@pytest.mark.usefixtures("tiny_demo")
def test_bench_compares_nothing_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("decoders.bench.records.waiting", lambda records: 0.7)
    done = run(*BENCH, "-s", "prompt_lookup", "--limit", "1", "--json", str(tmp_path / "out.json"))
    assert done.exit_code == 0, done.output
    assert "steps waited 70% of their time" in done.output and "Use prompt_lookup" not in done.output
    result = json.loads((tmp_path / "out.json").read_text())
    assert "ratios are left out" in result["machine"]["busy"] and not result["verdicts"]
    assert all(r["ratio"] is None and r["tokens_per_second"]["median"] > 0 for r in result["records"])


@pytest.mark.usefixtures("tiny_demo")
def test_bench_writes_json_with_machine_and_records(tmp_path: Path) -> None:
    done = run(
        *BENCH, "-s", "prompt_lookup", "--prompts", "all", "--batch", "1,2", "--json", str(tmp_path / "out.json")
    )
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out.json").read_text())
    assert set(result) == {"machine", "run", "complete", "verdicts", "records"} and result["complete"]
    assert [(v["dtype"], v["batch"]) for v in result["verdicts"]] == [("float32", 1), ("float32", 2)]
    assert result["machine"]["copy_bandwidth"] > 0
    assert {(r["method"], r["batch"], r["kind"]) for r in result["records"]} == {
        (c, b, k) for c in ("transformers", "prompt_lookup") for b in (1, 2) for k in ("copy", "code", "docstring")
    }
    assert all(r["identical"] for r in result["records"])
    assert {
        "tokens_per_second", "ratio", "first_token", "accepted_length", "step_ms", "first_call",
        "compile_seconds", "compilations", "recompilations", "peak_memory", "cache_bytes",
        "bandwidth_fraction", "identical", "status", "reason", "samples",
    } <= set(result["records"][0])  # fmt: skip
    assert "prompt_lookup" in done.output


@pytest.mark.usefixtures("tiny_demo")
def test_bench_measures_dtypes_side_by_side_and_passes_settings_on() -> None:
    done = run(
        *BENCH, "-s", "prompt_lookup", "--prompts", "copy", "--dtype", "float32,bfloat16", "--set", "slots=300",
        "--set", "prompt_lookup.length=3", "--json", "-",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    records = json.loads(done.stdout)["records"]
    assert [(r["dtype"], r["method"]) for r in records] == [
        (d, c) for d in ("float32", "bfloat16") for c in ("transformers", "prompt_lookup")
    ]
    assert records[1]["settings"] == {"prompt_lookup": {"length": 3}}


@pytest.mark.usefixtures("tiny_demo")
def test_bench_hands_a_drafts_tokenizer_on(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "other")
    methods: list[bench.Method] = []

    def measure(chosen: list[bench.Method], *_: Any, **__: Any) -> Any:
        methods.extend(chosen)
        raise SettingsError("enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "measure", measure)
        other = ("--assistant-tokenizer", str(tmp_path / "other"), "--prompts", "copy")
        run(*BENCH, "-s", "prompt_lookup,speculative", *other)
    given = {method.name: "assistant_tokenizer" in method.arguments for method in methods}
    assert given == {"transformers": False, "prompt_lookup": False, "speculative": True}
    done = run(*BENCH, "--assistant-tokenizer", str(tmp_path / "nowhere"))
    assert done.exit_code == 2 and "cannot be loaded" in done.output


@pytest.mark.usefixtures("tiny_demo")
def test_bench_measures_variants_of_one_strategy() -> None:
    names = "speculative[length=2],speculative[length=3,tree=static,nodes=4],prompt_lookup+autoregressive"
    done = run(
        *BENCH[:-1], "transformers,transformers-assisted[2]", "--strategies", names, "--set", "speculative.children=2",
        "--prompts", "copy", "--details", "--json", "-",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    records = {r["method"]: r for r in json.loads(done.stdout)["records"]}
    assert list(records) == [
        "transformers", "transformers-assisted[2]", "speculative[length=2]",
        "speculative[length=3,tree=static,nodes=4]", "prompt_lookup+autoregressive",
    ]  # fmt: skip
    assert [r["reason"] for r in records.values() if r["status"] != "ok"] == []
    assert records["speculative[length=2]"]["settings"] == {"speculative": {"children": 2, "length": 2}}
    assert records["speculative[length=2]"]["draft_passes"] == 2.0
    assert 0 < records["speculative[length=2]"]["overhead"] < 1
    assert records["transformers-assisted[2]"]["draft_passes"] > 1
    # Whole names stand in the tables: rich would take brackets for markup.
    assert "transformers-assisted[2]" in done.stderr
    assert "draft/step" in done.stderr


@pytest.mark.usefixtures("tiny_demo")
def test_bench_samples() -> None:
    arguments = ("-s", "prompt_lookup", "--prompts", "copy", "--temperature", "0.8", "--seed", "5", "--top-k", "9")
    done = run(*BENCH, *arguments, "--json", "-")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["run"]["sampling"] == {"temperature": 0.8, "top_k": 9, "top_p": 1.0, "seed": 5}
    assert [(r["method"], r["identical"], r["incomparable"]) for r in result["records"]] == [
        ("transformers", None, "n/a"), ("autoregressive", True, ""), ("prompt_lookup", True, "")
    ]  # fmt: skip
    greedy = run(*BENCH, "-s", "prompt_lookup", "--prompts", "copy", "--temperature", "0", "--json", "-")
    assert json.loads(greedy.stdout)["run"]["sampling"] is None


@pytest.mark.usefixtures("tiny_demo")
def test_bench_measures_a_made_up_drafter_and_never_advises_it() -> None:
    arguments = ("-s", "autoregressive", "--prompts", "copy", "--temperature", "1", "--acceptance", "1,1,1")
    arguments += ("--acceptance", "0")
    done = run(*BENCH, *arguments, "-n", "20", "--json", "-")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert [(r["method"], r["identical"], r["accepted_length"]) for r in result["records"][2:]] == [
        ("synthetic[1,1,1]", True, 4.0), ("synthetic[0]", True, 1.0)
    ]  # fmt: skip
    assert "synthetic" not in result["verdicts"][0]["text"]


@pytest.mark.parametrize(
    "arguments",
    [
        "bench -s prompt_lokup", "bench -s prompt_lookup[lenght=3]", "bench -s suffix[nodes=0]+ngram",
        "bench -s suffix[verifier=blok]", "bench -s suffix[grammar=jsn]", "bench --set prompt_lookup.lenght=3",
        "bench --set sufix.nodes=3", "bench -s ngram --set suffix.nodes=3", "bench --baselines transfomers",
        "bench --acceptance 0.8,0.9",
        "bench --dtype float23", "bench --json no/such/file", "bench --plot no/such/a.png", "bench --json .",
        "bench load -s prompt_lokup", "bench load -s speculative", "generate x/y z -s speculative", "warmup x/y -s speculative",
        "serve x/y -s speculative", "bench load --json no/such/file", "advise demo --json no/such/file",
    ],
)  # fmt: skip
def test_mistakes_are_told_before_a_model_is_loaded(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(models, "load", None)
    done = run(*arguments.split())
    assert done.exit_code == 2, done.output
    assert done.stderr.splitlines()[-1].startswith("error: ") and "assistant_model" not in done.stderr


@pytest.mark.usefixtures("tiny_demo")
def test_bench_takes_several_kinds_of_prompt() -> None:
    done = run(*BENCH, "-s", "autoregressive", "--prompts", "code,predictable,random", "--limit", "2", "--json", "-")
    assert done.exit_code == 0, done.output
    samples = [s["workload"] for r in json.loads(done.stdout)["records"] for s in r["samples"]]
    assert set(samples) == {"code-01", "predictable-01", "predictable-02", "random-01", "random-02"}


@pytest.mark.usefixtures("tiny_demo")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch", "one"), "batch sizes such as 1,4"),
        (("--shape", "qwen2.5-0.5"), "Did you mean 'qwen2.5-0.5b'"),
        (("--shape", "llama-1b", "--model", "demo"), "not both"),
        (("--shape", "llama-1b", "--prompts", "code"), "prompts are random tokens"),
        (("--prompt-length", "long"), "tokens such as 64,2000"),
        (("--set", "prefill_chunk=0"), "prefill_chunk"),
        (("-s", "prompt_lookup[compile=maybe]"), "true, false or auto"),
        (("--batch", "0"), "batch sizes such as 1,4"),
        (("--prompts", "nowhere.txt"), "'nowhere.txt' is not a file, and 'nowhere.txt' is not a kind"),
        (("--set", "length=3"), "name the strategy too"),
        (("-s", "prompt_lokup"), "prompt_lookup"),
        (("-s", "prompt_lookup[length=3"), "a closing ']' is missing"),
        (("-s", "prompt_lookup[lenght=3]"), "Did you mean 'length'?"),
        (("--baseline", "transformers-static[3]"), "only transformers-assisted takes"),
        (("--baseline", "transfomers"), "Did you mean 'transformers'?"),
        (("--prompts", "code,random,poem"), "predictable, random"),
        (("--prompts", "cpy,code"), "'cpy' is not a kind. Did you mean 'copy'?"),
        (("--suite", "specbench", "--data", "."), "Did you mean 'spec-bench'"),
        (("--suite", "gsm8k", "--prompts", "code"), "give either --suite with --data, or --prompts"),
        (("--data", "question.jsonl"), "give either --suite with --data, or --prompts"),
        (("--suite", "gsm8k", "--shape", "llama-1b"), "prompts are random tokens"),
        (("--acceptance", "0.8,0.9"), "none may be larger than the share before it"),
        (("--temperature", "0", "--top-k", "3"), "temperature 0 is greedy"),
        (("--dtype", "float23"), "float32"),
        (
            ("--json", "no/such/directory.json", "-s", "prompt_lookup", "--prompts", "copy"),
            "there is no folder no/such",
        ),
        (("--plot", "speed.pgn"), "Did you mean 'png'?"),
    ],
)
def test_bench_mistakes_end_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = run(*BENCH, *arguments)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())


def test_a_plot_is_written(methods: list[Any], tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = bench.summarise(bench.measure(methods, bench.workloads(tokenizer, TEXTS[:1]), new_tokens=2, repeats=1))
    plot(records, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"hf-decoders\[bench\]"):
        check_format(tmp_path / "speed.png")


@pytest.mark.usefixtures("tiny_demo")
def test_demo_reports_identical_output() -> None:
    done = run(*DEMO, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["identical"] is True
    assert result["prompts"] == ["copy-01", "code-01"]
    assert [r["method"] for r in result["records"] if r["kind"] == "copy"] == [
        "transformers", "autoregressive", "prompt_lookup"
    ]  # fmt: skip


@pytest.mark.usefixtures("tiny_demo")
def test_demo_shows_few_strategies_and_names_the_command_for_all() -> None:
    common = ("demo", "--no-compile", "-n", "2", "--repeats", "1", "--no-live", "--prompt", "ab ab ab")
    listed = json.loads(run(*common, "--json").stdout)["records"]
    assert [r["method"] for r in listed] == [
        "transformers", "transformers-assisted", "autoregressive", "prompt_lookup", "speculative"
    ]  # fmt: skip
    assert "decoders bench measures all strategies" in run(*common).output


@pytest.mark.usefixtures("tiny_demo")
def test_demo_writes_its_first_text_before_anything_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    real = live.show
    monkeypatch.setattr(live, "show", lambda console, c, *a: (asked.append(c.arguments), real(console, c, *a)))
    done = run("demo", "-n", "6", "--seconds", "0", "-s", "autoregressive", "-s", "prompt_lookup")
    assert done.exit_code == 0, done.output
    (arguments,) = asked
    assert arguments["strategy"] == "prompt_lookup"
    assert arguments["decoders_config"]["compile"] in ("auto", False)
    assert "a first text, with prompt_lookup" in done.output and "ratio" not in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json"], "--seconds 0 leaves out the table, and --json the first text"),
        (["--no-live"], "and --no-live the first text, so nothing would be shown: give --seconds more than 0"),
        (["-s", "speculative"], "error: speculative: "),
    ],
)
def test_demo_without_time_for_anything_to_show_is_refused(
    arguments: list[str], said: str, tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    tiny_model("llama").save_pretrained(tmp_path)
    done = run("demo", str(tmp_path), "-n", "6", "--seconds", "0", *arguments)
    assert done.exit_code == 2 and not done.stdout and said in done.output, done.output


@pytest.mark.usefixtures("tiny_demo")
def test_demo_stops_after_the_time_it_was_given() -> None:
    done = run(*DEMO, "--seconds", "0.001", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["rounds"], result["prompts"]) == (1, ["copy-01", "code-01"]), "one round of both is always there"
    said = run(*DEMO[:-4], "-s", "prompt_lookup", "-n", "40", "--repeats", "3", "--seconds", "0.001").output
    assert "up to 0.001 s (--seconds), or longer" in said and "1 of 3 rounds for --seconds 0.001" in said
    assert "texts of 16 tokens in place of 40" in " ".join(said.split())
    assert "copy prompt" in said and "code prompt" in said


def test_demo_takes_a_folder_and_asks_it_what_one_asks_chat_models(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "mine")
    tiny_model("llama").save_pretrained(tmp_path / "mine")
    done = run("demo", str(tmp_path / "mine"), *DEMO[1:], "--json", "--prompts", "instruct:chat")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert [r["method"] for r in result["records"]] == ["transformers", "autoregressive", "prompt_lookup"]
    assert result["prompts"] == ["instruct:chat-01"]


def test_instructions_go_through_the_chat_template() -> None:
    asked: list[Any] = []

    class Template:
        chat_template = "…"

        def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
            assert not tokenize and add_generation_prompt
            return f"<{messages[0]['role']}>{messages[0]['content']}"

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            asked.append((text, add_special_tokens))
            return {"input_ids": [1, 2]}

    tokenizer: Any = Template()
    (work, *_) = bench.workloads(tokenizer, instructions("chat"))
    assert work.input_ids.tolist() == [[1, 2]]
    assert asked[0][0].startswith("<user>My neighbour") and asked[0][1] is False, "special tokens are the template's"
    encode(tokenizer, "plain text")
    assert asked[-1] == ("plain text", True)


def test_there_are_two_instructions_of_every_kind() -> None:
    for kind in INSTRUCTIONS:
        names = [name for name, _, messages in instructions(kind) if messages[0]["role"] == "user"]
        assert names == [f"{kind}-01", f"{kind}-02"]


def test_prompts_are_read_with_messages_and_kinds(tmp_path: Path) -> None:
    lines = [
        {"kind": "a", "text": "one"},
        {"kind": "b", "messages": [{"role": "user", "content": "two"}]},
        {"text": "x"},
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_prompts(str(tmp_path / "mine.jsonl"), 4) == [
        ("a-01", "a", "one"), ("b-01", "b", [{"role": "user", "content": "two"}]), ("mine-01", "mine", "x")
    ]  # fmt: skip
    assert [kind for _, kind, _ in read_prompts("instruct", 1)] == [f"instruct:{kind}" for kind in INSTRUCTIONS]
    assert [name for name, _, _ in read_prompts("instruct:edit,code", 1)] == ["instruct:edit-01", "code-01"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"txt": "x"}', "a line must be an object with the field text or messages, not {'txt': 'x'}"),
        ('"x"', "a line must be an object with the field text or messages, not 'x'"),
        ('{"text": 5}', "a prompt must be a text, or messages with role and content, not 5"),
        ('{"messages": ["x"]}', r"messages with role and content, not \['x'\]"),
        ('{"text": "x"}\n\n{"text": "x"', "mine.jsonl' cannot be read: line 3, column 13: Expecting"),
    ],
)
def test_a_line_that_is_no_prompt_is_told(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(line)
    with pytest.raises(SettingsError, match=said):
        read_prompts(str(tmp_path / "mine.jsonl"), 4)


@pytest.mark.parametrize(("content", "said"), [("", "a prompt is empty"), (5, "a prompt must be a text, or messages")])
def test_a_workload_needs_a_text(content: Any, said: str, tokenizer: Any) -> None:
    with pytest.raises(SettingsError, match=said):
        bench.workloads(tokenizer, [("first", "mine", "one"), ("second", "mine", content)])


def test_bench_measures_shapes_with_random_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict(
        model_type="llama", num_hidden_layers=1, hidden_size=32, num_attention_heads=4, intermediate_size=48, vocab_size=128,
        max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    for name in ("small", "other"):
        monkeypatch.setitem(SHAPES, name, sizes)
    done = run(
        *BENCH, "--shape", "small,other", "--prompt-length", "8,20", "--limit", "1",
        "-s", "autoregressive,autoregressive[compile=false]",
        "--dtype", "bfloat16", "--details", "--json", "-",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["run"]["model"], result["run"]["shapes"]) == (None, ["small", "other"])
    assert [(r["model"], r["method"], r["kind"], r["prompt_tokens"]) for r in result["records"]] == [
        (m, c, f"{n} random tokens", n)
        for m in ("small", "other")
        for c in ("transformers", "autoregressive", "autoregressive[compile=false]")
        for n in (8, 20)
    ]
    ours = result["records"][2]
    assert ours["status"] == "ok", ours["reason"]
    assert ours["compiled_share"] == 0 and ours["prefill"]["median"] > 0 and ours["cold_first_token"] > 0
    assert ours["memory_added"] >= 0
    text = " ".join(done.stderr.split())
    for said in ("small · 8 random tokens · 1 row · bfloat16", "means nothing", "cold first", "added"):
        assert said in text, said


@pytest.mark.usefixtures("tiny_demo")
def test_settings_of_the_loop_reach_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    real = bench.strategy_methods
    monkeypatch.setattr(bench, "strategy_methods", lambda *a, **k: asked.extend(made := real(*a, **k)) or made)
    arguments = ("-s", "prompt_lookup,prompt_lookup[compile=false]", "--prompts", "copy", "--set", "prefill_chunk=64")
    done = run("bench", "--repeats", "1", "-n", "2", "--baseline", "transformers", "--no-compile", *arguments)
    assert done.exit_code == 0, done.output
    configs = [c.arguments["decoders_config"] for c in asked]
    assert [(c["compile"], c["prefill_chunk"]) for c in configs] == [(False, 64), (False, 64)]
    assert all(c.get("reuse") is False for c in configs) or "reuse" not in RuntimeSettings.model_fields


@pytest.mark.usefixtures("tiny_demo")
def test_demo_exits_with_1_if_an_exact_strategy_writes_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from decoders.bench import measurement

    real = measurement.written
    monkeypatch.setattr(measurement, "written", lambda c, w, s: [[t + c.ours for t in row] for row in real(c, w, s)])
    done = run(*DEMO, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["identical"] is False


@pytest.mark.usefixtures("tiny_demo")
def test_demo_takes_one_prompt() -> None:
    done = run(*DEMO, "--prompt", "ab", "--prompts", "copy")
    assert done.exit_code == 2
    assert "give --prompt or --prompts, not both" in done.output


def test_demo_names_the_kinds_there_are() -> None:
    done = run(*DEMO, "--prompts", "poem")
    assert done.exit_code == 2
    assert "docstring" in done.output


def test_accepted_draft_tokens_have_a_colour_of_their_own(tokenizer: Any) -> None:
    import torch

    stream = ColouredStream(tokenizer)
    stream.put(torch.tensor([[1, 2]]))  # the prompt
    stream.on_step([tokenizer("abc")["input_ids"]])
    for token in tokenizer("abc")["input_ids"]:
        stream.put(torch.tensor([token]))
    stream.on_step([tokenizer("d")["input_ids"]])
    stream.put(torch.tensor(tokenizer("d")["input_ids"]))
    stream.end()
    assert stream.pieces == [("a", True), ("b", True), ("c", False), ("d", False)]
    assert stream.text().plain == "abcd"
    assert [span.style for span in stream.text().spans[:2]] == [ACCEPTED, ACCEPTED]


def test_a_character_in_several_tokens_appears_when_it_is_whole() -> None:
    import torch

    spelled = {0: b"", 1: b"\xc3", 2: b"\xa9", 3: b"!"}
    tokenizer = SimpleNamespace(
        decode=lambda tokens, **_: b"".join(spelled[t] for t in tokens).decode(errors="replace"),
        convert_ids_to_tokens=lambda tokens: [None] * len(tokens),
    )
    stream = ColouredStream(tokenizer)  # type: ignore[arg-type]
    for token in (0, 1, 2, 3):
        stream.put(torch.tensor([token]))
    assert [piece for piece, _ in stream.pieces] == ["", "é", "!"]


def test_compiling_is_left_out_of_the_speed(
    monkeypatch: pytest.MonkeyPatch, methods: list[Any], tokenizer: Any
) -> None:
    def decode(method: Any, work: Any, new_tokens: int, stream: Any) -> Any:
        stream.pieces += [("a", True)] * 50
        return SimpleNamespace(report=Report("", new_tokens=[50], timings=Timings(kernels=3.0, compile=4.0, core=0.5)))

    monkeypatch.setattr(live, "decode", decode)
    console = Console(width=80)
    with console.capture() as shown:
        show(console, methods[0], bench.workloads(tokenizer, TEXTS[:1])[0], tokenizer, "one", "", 6)
    assert "100 tokens/s" in shown.get()


def test_live_text_ends_with_everything_written(methods: list[Any], tokenizer: Any) -> None:
    (work,) = bench.workloads(tokenizer, TEXTS[:1])
    for method in (*methods, replace(methods[-1], name="prompt_lookup[length=3]")):
        console = Console(force_terminal=True, width=100, height=40, record=True, file=io.StringIO())
        show(console, method, work, tokenizer, "one", TEXTS[0][2], 6)
        assert method.name in console.export_text()


@pytest.mark.usefixtures("tiny_demo")
def test_the_command_measures_both_turns_of_a_suite_greedily_and_drawn(tmp_path: Path) -> None:
    two = {"category": "writing", "turns": ["Write a post.", "Shorten it."]}
    one = {"question_id": 7, "category": "math_reasoning", "turns": ["What is 2 + 3?"]}
    rows = [{**two, "question_id": 81}, {**two, "question_id": 82}, one]
    (tmp_path / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = CliRunner().invoke(
        app, ["bench", "--no-compile", "-n", "4", "--baseline", "transformers", "-s", "prompt_lookup", "--suite", "spec-bench",
              "--data", str(tmp_path), "--samples", "1", "--json", "-"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    names = result["run"]["questions"]
    assert result["run"]["suite"] == "spec-bench" and names[-1] == "math_reasoning-7" and len(names) == 2
    records = result["records"]
    assert [(r["temperature"], r["method"], r["kind"]) for r in records] == [
        (temperature, method, kind)
        for temperature in (0.0, 1.0)
        for method in ("transformers", "autoregressive", "prompt_lookup")
        for kind in ("writing", "math_reasoning")
    ]
    assert [s["workload"] for s in records[0]["samples"]] == [names[0], f"{names[0]}, turn 2"]
    ours = [r for r in records if r["method"] == "prompt_lookup"]
    assert all(r["identical"] and r["plain_ratio"]["median"] > 0 and r["accepted_length"] >= 1 for r in ours)
    assert [v["temperature"] for v in result["verdicts"]] == [0.0, 1.0]
    tables = " ".join(done.stderr.split())
    assert "1/1 answering earlier turns" in tables
    assert tables.count("speed-up over plain decoding / tokens per step") == 2 and "T = 1" in tables
    # Below each table the prompts of all categories and of each, here two turns and one; below all the machine.
    lines = [line.split() for line in done.stderr.splitlines()]
    assert [line[1:] for line in lines if line[:1] == ["prompts"]] == [["3", "2", "1"]] * 2
    machine = result["machine"]
    assert (
        f"{machine['cpu']}, {amount(machine['threads'], 'thread')}, device cpu" in tables
        and f"torch {machine['torch']}" in tables
    )
