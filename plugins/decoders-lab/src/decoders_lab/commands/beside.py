"""``decoders bench beside`` and ``bench load-beside``: other engines and padded models, measured in turns with our methods."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decoders.cli.bench import measure
from decoders.cli.bench_load import measure_load
from decoders.cli.benches import with_options_of
from decoders.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decoders.bench.load import Arrival

    from ..vllm_engine import Vllm

VLLM = "vllm"


@with_options_of(measure, without=["subjects", "shapes"])
def beside(
    engines: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            "-e",
            help="Other engines with the same weights, comma-separated or repeated: llama.cpp, openvino; everything "
            "that they do, or one number format and mode, as in llama.cpp\\[q8_0], openvino\\[int4,lookup].",
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="Pad the model and its draft to the size of a larger one, 110m, 0.5b, 1b or 3b, without changing what they "
            "write: a Llama with tied embeddings, such as the demo."
        ),
    ] = None,
    **options: Any,
) -> None:
    """Measure other engines, or a small model at a larger one's cost, beside strategies and transformers.

    All options of decoders bench for models apply.
    """
    if engines and (options["temperature"] or options["top_k"] or options["top_p"]):
        raise SettingsError("--engine compares greedy decoding: other engines draw other tokens")
    if engines and options["suite"] is not None:
        options["temperature"] = 0.0
    has_draft = options["draft"] is not None or options["model"] in (None, "demo")

    from ..subjects import LabSubjects, checked_engines

    with LabSubjects(scale, checked_engines(engines, has_draft)) as subjects:
        measure(**options, subjects=subjects)


@with_options_of(measure_load, without=["load_model", "others", "facts"])
def load_beside(
    vllm: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON",
            help="Interpreter of an environment that has vLLM, for --method vllm. The model is a folder.",
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="Pad the model to the size of a larger one, 110m, 0.5b, 1b or 3b, without changing what it writes; --dtype has to be "
            "given. A Llama with tied embeddings, such as the demo."
        ),
    ] = None,
    **options: Any,
) -> None:
    """Measure a load with vLLM, or at a larger model's cost, beside a scheduler, batches and transformers.

    All options of decoders bench load apply.
    """
    from decoders.cli.benches import pieces

    model, wanted = options["model"], pieces(options["methods"]) or []
    if VLLM in wanted and (vllm is None or not vllm.is_file() or not Path(model).is_dir()):
        raise SettingsError(
            "method vllm runs in an environment of its own, on a model's folder: --vllm PYTHON, a file, and a folder"
        )
    if VLLM in wanted and scale is not None:
        raise SettingsError(
            "method vllm reads the model's folder, and --scale pads a model in memory: leave one of them out"
        )

    def opened(load: Sequence[Arrival], dtype: str) -> Vllm:
        from ..vllm_engine import Vllm

        assert vllm is not None
        slots = max(len(request.prompt) + request.new_tokens for request in load)
        return Vllm(vllm, model, dtype, options["rows"], slots, options["threads"])

    def load_scaled(name: str, dtype: str, device: str | None) -> Any:
        from decoders.cli.models import load

        from ..scaling import in_scale

        loaded, tokenizer = load(name, "float32", device)
        return in_scale(loaded, None, str(scale), dtype)[0], tokenizer

    if scale is not None:
        from ..scaled_shapes import shape_named

        shape_named(scale)
    measure_load(
        **options, load_model=None if scale is None else load_scaled, others={VLLM: opened}, facts={"scale": scale}
    )
