"""Images in chat completions: data URLs alone, in the places where they stand, read once for all questions about them."""

from __future__ import annotations

import base64
import io
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlavaProcessor, PreTrainedTokenizerFast
from transformers.image_utils import load_image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from decoders.cli import models
from decoders.server import prompts
from decoders.server.images import image_of
from decoders.testing.images import SEEING

from .conftest import EAGER, SIZE

Image = pytest.importorskip("PIL.Image")
CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def url_of(colour: tuple[int, int, int], kind: str = "PNG", size: tuple[int, int] = (40, 30)) -> str:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


RED, BLUE = (url_of(colour) for colour in ((255, 0, 0), (0, 0, 255)))


def asked(question: str, *urls: str, **options: Any) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*images, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, **options}


@pytest.fixture(scope="module")
def processor(byte_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> LlavaProcessor:
    names = ["<pad>", "</s>", "<unk>", "<image>"]
    tokenizer = byte_tokenizer(names, unk_token="<unk>", pad_token="<pad>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": 28, "width": 28}
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=size, crop_size=size), tokenizer=tokenizer, patch_size=7,
        vision_feature_select_strategy="default", num_additional_image_tokens=1, chat_template=TEMPLATE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def seeing(processor: LlavaProcessor, served: Any) -> Iterator[Any]:
    """A client of a server of a model that sees."""
    pytest.importorskip("prometheus_client")
    from decoders.server.limits import Limits
    from decoders.server.service import Service

    design = SEEING["llava"]
    text = design.options["text_config"] | {"vocab_size": SIZE}
    token = processor.tokenizer.convert_tokens_to_ids("<image>")
    model = replace(design, options=dict(design.options) | {"text_config": text, "image_token_index": token})(0)
    limits = Limits(slots=400, prompt_tokens=300, new_tokens=200)
    options: dict[str, Any] = dict(name="tiny", strategy="prompt_lookup", limits=limits, config=EAGER)
    with served(Service(model, processor.tokenizer, processor=processor, **options)) as client:
        client.model = model
        yield client


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_answers_are_those_of_generate(seeing: Any, processor: LlavaProcessor) -> None:
    answer = seeing.post(CHAT, json=asked("What colour?", RED, BLUE))
    images = [Image.new("RGB", (40, 30), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    text = "<user><image><image>What colour?</s><assistant>"
    inputs = processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt")
    expected = seeing.model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
    new = expected[0, inputs["input_ids"].shape[1] :]
    assert text_of(answer) == processor.tokenizer.decode(new, skip_special_tokens=True)
    assert answer.json()["usage"]["prompt_tokens"] == inputs["input_ids"].shape[1] > 32  # each image is 16 tokens


def test_another_image_gives_another_answer_and_another_question_reads_the_image_no_more(seeing: Any) -> None:
    red, blue = (seeing.post(CHAT, json=asked("Describe it.", url)) for url in (RED, BLUE))
    assert text_of(red) != text_of(blue)
    again = seeing.post(CHAT, json=asked("What else?", RED)).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_responses_see_what_conversations_see(seeing: Any) -> None:
    message = text_of(seeing.post(CHAT, json=asked("What colour?", RED, BLUE)))
    content = [
        *({"type": "input_image", "image_url": url} for url in (RED, BLUE)),
        {"type": "input_text", "text": "What colour?"},
    ]
    body = {"max_output_tokens": 8, "temperature": 0}
    answer = seeing.post("/v1/responses", json={"input": [{"role": "user", "content": content}], **body}).json()
    assert answer["output"][0]["content"][0]["text"] == message
    again = seeing.post("/v1/responses", json={"input": "And?", "previous_response_id": answer["id"], **body}).json()
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > 32  # the images are part of what was read
    broken = {"type": "input_image", "image_url": "data:image/png;base64,aGFsbG8="}
    refused = seeing.post("/v1/responses", json={"input": [{"role": "user", "content": [broken]}]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"
    assert "the image cannot be read" in refused.json()["error"]["message"]


def test_formats_and_streams(seeing: Any) -> None:
    lossless = [
        text_of(seeing.post(CHAT, json=asked("Hm?", url_of((9, 200, 90), kind)))) for kind in ("PNG", "BMP", "GIF")
    ]
    assert len(set(lossless)) == 1
    with seeing.stream("POST", CHAT, json=asked("Hm?", url_of((9, 200, 90)), stream=True)) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    assert len(lines) > 2


def saved(image: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def kinds_of_images() -> dict[str, bytes]:
    """Files of every format, mode and orientation, by what they are."""
    colours = Image.frombytes("RGB", (4, 3), bytes(range(7, 43)))
    palette = colours.quantize(8)
    files = {mode: saved(colours.convert(mode), "PNG") for mode in ("1", "L", "LA", "P", "RGBA", "I;16")}
    files |= {"CMYK": saved(colours.convert("CMYK"), "JPEG"), "BMP": saved(colours, "BMP")}
    files |= {kind: saved(palette, kind, transparency=2) for kind in ("PNG", "GIF")}
    files["frames"] = saved(palette, "GIF", save_all=True, append_images=[palette.rotate(180)])
    for kind, turn in itertools.product(("JPEG", "PNG", "WEBP"), range(1, 9)):
        exif = Image.Exif()
        exif[0x0112] = turn
        files[f"{kind} {turn}"] = saved(colours, kind, exif=exif)
    return files


def test_models_see_what_load_image_gives() -> None:
    for name, data in kinds_of_images().items():
        url = (
            f"data:image/png;base64,{base64.encodebytes(data).decode()}"  # whatever it is called, in lines as in mails
        )
        ours, expected = image_of({"image_url": {"url": url}}, "p", []), load_image(url)
        assert (ours.mode, ours.size, ours.tobytes()) == (expected.mode, expected.size, expected.tobytes()), name


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.org/cat.png", "(data:image/png;base64,…), not 'https://example.org/cat.png'"),
        ("file:///etc/passwd", "fetches nothing"),
        ("data:image/png,plain", "not in base64"),
        ("data:image/png;base64,%%%", "not in base64"),
        ("data:image/png;base64,aGFsbG8=", "the image cannot be read (of no known format): formats are"),
        (url_of((0, 0, 0), "PNG", (5000, 4000)), "5000 x 4000 pixels; the limit is 16777216"),
        (url_of((0, 0, 0), "TIFF"), "formats are PNG, JPEG"),
        (None, "an image must be a data URL"),
    ],
)
def test_what_is_no_image_is_refused(seeing: Any, url: Any, why: str) -> None:
    answer = seeing.post(CHAT, json=asked("?", url))
    assert answer.status_code == 400 and why in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages.0.content.0"


def test_there_is_a_most_of_images(seeing: Any) -> None:
    answer = seeing.post(CHAT, json=asked("?", *[RED] * 17))
    assert answer.status_code == 400 and "more than 16 images" in answer.json()["error"]["message"]


def test_small_files_with_many_pixels_are_refused_together(seeing: Any) -> None:
    large = url_of((0, 0, 0), "PNG", (4000, 3000))
    assert len(large) < 100_000
    answer = seeing.post(CHAT, json=asked("?", large, large))
    assert answer.status_code == 400 and "4000 x 3000 pixels" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages.0.content.1"


def test_images_are_decoded_where_small_requests_do_not_wait_for_them(seeing: Any, monkeypatch: Any) -> None:
    names, decode = list[str](), prompts.image_of

    def noted(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return decode(*arguments)

    monkeypatch.setattr(prompts, "image_of", noted)
    assert text_of(seeing.post(CHAT, json=asked("?", RED))) is not None
    assert len(names) == 1 and names[0].startswith("decoders-compile")


def test_images_are_of_users(seeing: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": RED}}
    answer = seeing.post(CHAT, json=asked("?") | {"messages": [{"role": "system", "content": [image]}]})
    assert answer.status_code == 400 and "only parts of type text are supported" in answer.json()["error"]["message"]


def test_a_checkpoint_of_a_model_that_sees_is_served_with_its_processor(
    seeing: Any, processor: LlavaProcessor, tmp_path: Path
) -> None:
    seeing.model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    model, tokenizer = models.load(str(tmp_path))
    assert type(model) is type(seeing.model) and len(tokenizer) == len(processor.tokenizer)
    loaded = models.load_processor(str(tmp_path))
    assert loaded.image_processor is not None and loaded.chat_template == TEMPLATE
    assert models.load_processor("demo") is None


def test_a_processor_that_lacks_a_package_is_told_of(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    import transformers

    def lacking(*_: Any, **__: Any) -> None:
        raise ImportError("torchvision is needed")

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lacking)
    (tmp_path / "config.json").touch()
    assert models.load_processor(str(tmp_path)) is None
    assert "images are refused" in caplog.text and "torchvision is needed" in caplog.text
