"""Tiny random models that see, and prompts with images for them, made without a processor: pixels are random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from ..errors import UnknownNameError
from .models import VOCAB, WINDOW, _spread

#: The token that stands for a part of an image, that of videos, and those around an image, which are text.
IMAGE, VIDEO, BEGIN, END = 120, 121, 118, 119
#: Tokens of the text behind the last image, by row.
QUESTIONS = (9, 6, 11, 7)

Pixels = Callable[[int, torch.Generator], dict[str, Tensor]]


@dataclass(frozen=True)
class SeeingArchitecture:
    """How to build one tiny model that sees.

    Attributes:
        model_type: transformers' name of the design.
        options: config values.
        tokens: that stand for an image.
        pixels: what the model is given of so many images.
        types: the argument that tells tokens of images from those of text, if there is one.
        by_row: whether pixels are arranged by row of the batch, and then by image.
        embedding: see :class:`~decoders.testing.models.Architecture`.
    """

    model_type: str
    options: Mapping[str, Any]
    tokens: int
    pixels: Pixels
    types: str | None = None
    by_row: bool = False
    embedding: float = 1.0

    def __call__(self, seed: int = 0) -> PreTrainedModel:
        """The model, in evaluation mode, the same weights for the same seed; the global generator is left alone."""
        config = AutoConfig.for_model(self.model_type, **self.options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
            _spread(model, self.embedding)
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        return model.eval()


def _text(model_type: str | None = None, **others: Any) -> dict[str, Any]:
    plain = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return plain | ({"model_type": model_type} if model_type else {}) | others


def _tower(model_type: str | None = None, **others: Any) -> dict[str, Any]:
    plain = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=7
    )
    return plain | ({"model_type": model_type} if model_type else {}) | others


def _square(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, 28, 28, generator=generator)}


def _tiled(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(count, 2, 3, 28, 28, generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[28, 28]] * count)}


def _of_any_size(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(count, 3, 16, 24, generator=generator),
        "image_sizes": torch.tensor([[16, 24]] * count),
    }


def _patches(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """As the Qwen family has them: 4 x 6 patches, of which four are a token."""
    grid = torch.tensor([[1, 4, 6]] * count)
    return {"pixel_values": torch.randn(24 * count, 3 * 2 * 4 * 4, generator=generator), "image_grid_thw": grid}


def _placed_patches(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).view(1, 16, 2)
    return {
        "pixel_values": torch.rand(count, 16, 3 * 4 * 4, generator=generator),
        "image_position_ids": places.repeat(count, 1, 1),
    }


def _one_tile(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    ones = torch.ones(count, 1, dtype=torch.int64)
    pixels = torch.randn(count, 1, 1, 3, 28, 28, generator=generator)
    return {"pixel_values": pixels, "aspect_ratio_ids": ones, "aspect_ratio_mask": ones[:, None]}


_INDEX = {"image_token_index": IMAGE}
_TOKEN = {"image_token_id": IMAGE}
_MIXED = ["sliding_attention", "full_attention"]
_PINPOINTS = {"image_grid_pinpoints": [[28, 28], [28, 56], [56, 28]]}
_ROTARY = dict(rope_type="default", rope_theta=10000.0, mrope_section=[1, 1, 2])
_PATCHES = dict(
    depth=2, num_heads=4, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, in_channels=3, hidden_size=32
)
_WITH_VIDEO = _TOKEN | {"video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
_MLP = dict(intermediate_size=48, out_hidden_size=32)


def _qwen(model_type: str, text: dict[str, Any], vision: dict[str, Any]) -> SeeingArchitecture:
    options = dict(text_config=_text(rope_parameters=_ROTARY) | text, vision_config=_PATCHES | vision, **_WITH_VIDEO)
    return SeeingArchitecture(model_type, options, 6, _patches, "mm_token_type_ids")


def _idefics(model_type: str, text: str = "llama", **others: Any) -> SeeingArchitecture:
    options = dict(text_config=_text(text), vision_config=_tower(), **_TOKEN) | others
    return SeeingArchitecture(model_type, options, 4, _square, by_row=True)


def _llava(
    model_type: str, text: dict[str, Any], vision: dict[str, Any], tokens: int, pixels: Pixels, **others: Any
) -> SeeingArchitecture:
    return SeeingArchitecture(
        model_type, dict(text_config=text, vision_config=vision, **_INDEX) | others, tokens, pixels
    )


_CLIP, _SIGLIP = _tower("clip_vision_model", projection_dim=32), _tower("siglip_vision_model")
_LINEAR = dict(
    num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_num_key_heads=2, linear_num_value_heads=4, rope_parameters=_ROTARY | {"partial_rotary_factor": 1.0},
)  # fmt: skip

#: Designs whose prompts with images the shared loop decodes: name → builder, called with an optional seed.
SEEING: Mapping[str, SeeingArchitecture] = MappingProxyType(
    {
        "llava": _llava("llava", _text("llama"), _CLIP, 16, _square, image_seq_length=16),
        "llava_next": _llava("llava_next", _text("llama"), _CLIP, 36, _tiled, **_PINPOINTS),
        "llava_onevision": _llava(
            "llava_onevision", _text("qwen2"), _SIGLIP, 36, _tiled, video_token_index=VIDEO, **_PINPOINTS
        ),
        "mistral3": _llava(
            "mistral3", _text("mistral", sliding_window=None, head_dim=8),
            _tower("pixtral", image_size=32, patch_size=4, head_dim=8), 6, _of_any_size, tie_word_embeddings=False,
        ),
        "aya_vision": _llava(
            "aya_vision", _text("cohere2", sliding_window=WINDOW, layer_types=_MIXED, logit_scale=1.0), _SIGLIP, 4, _square,
            downsample_factor=2,
        ),
        "internvl": SeeingArchitecture(
            "internvl",
            dict(text_config=_text("qwen2"), vision_config=_tower(image_size=[28, 28], patch_size=[7, 7]), image_seq_length=4,
                 tie_word_embeddings=False, **_TOKEN), 4, _square,
        ),
        # Tokens of an image see each other.
        "gemma3": SeeingArchitecture(
            "gemma3",
            dict(text_config=_text("gemma3_text", head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=_MIXED),
                 vision_config=_SIGLIP, mm_tokens_per_image=4, boi_token_index=BEGIN, eoi_token_index=END, **_INDEX),
            4, _square, "token_type_ids", embedding=0.03,
        ),
        "gemma4": SeeingArchitecture(
            "gemma4",
            dict(text_config=_text("gemma4_text", head_dim=8, global_head_dim=16, num_hidden_layers=4, sliding_window=WINDOW,
                                   layer_types=_MIXED * 2, num_kv_shared_layers=2, vocab_size_per_layer_input=VOCAB,
                                   hidden_size_per_layer_input=8, use_bidirectional_attention="vision"),
                 vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                    num_key_value_heads=4, head_dim=8, pooling_kernel_size=2, patch_size=4,
                                    position_embedding_size=64),
                 audio_config=None, video_token_id=VIDEO, audio_token_id=117, boi_token_id=BEGIN, eoi_token_id=END,
                 boa_token_id=115, eoa_token_index=116, **_TOKEN),
            4, _placed_patches, "mm_token_type_ids", embedding=0.03,
        ),
        # Images take fewer positions than tokens.
        "qwen2_vl": _qwen("qwen2_vl", {}, {"embed_dim": 32}),
        "qwen2_5_vl": _qwen("qwen2_5_vl", {}, _MLP | {"window_size": 16, "fullatt_block_indexes": [1]}),
        "qwen3_vl": _qwen(
            "qwen3_vl", {"head_dim": 8}, _MLP | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        ),
        "qwen3_5": _qwen("qwen3_5", {"head_dim": 8} | _LINEAR, _MLP | {"num_position_embeddings": 64}),
        "glm4v": _qwen(
            "glm4v", {"rope_parameters": _ROTARY | {"partial_rotary_factor": 1.0}}, _MLP | {"image_size": 32}
        ),
        "smolvlm": _idefics("smolvlm", scale_factor=2),
        "idefics3": _idefics("idefics3", scale_factor=2),
        "idefics2": _idefics(
            "idefics2", "mistral",
            perceiver_config=dict(hidden_size=32, resampler_n_latents=4, resampler_depth=1, resampler_n_heads=4,
                                  resampler_head_dim=8, num_key_value_heads=2),
        ),
    }
)  # fmt: skip

#: Designs whose prompts with images are refused: text that sees what comes later, and layers that look at the image in every step.
BLIND: Mapping[str, SeeingArchitecture] = MappingProxyType(
    {
        "paligemma": SeeingArchitecture(
            "paligemma",
            dict(text_config=_text("gemma", head_dim=8), vision_config=_tower("siglip_vision_model", projection_dim=32),
                 projection_dim=32, hidden_size=32, **_INDEX), 16, _square,
        ),
        "mllama": SeeingArchitecture(
            "mllama",
            dict(text_config=_text(num_hidden_layers=4, cross_attention_layers=[1, 3], bos_token_id=1, eos_token_id=2),
                 vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_global_layers=1,
                                    attention_heads=4, image_size=28, patch_size=7, vision_output_dim=64,
                                    intermediate_layers_indices=[0], max_num_tiles=1, supported_aspect_ratios=[[1, 1]]),
                 **_INDEX), 1, _one_tile,
        ),
    }
)  # fmt: skip


def tiny_seeing_model(name: str, seed: int = 0) -> PreTrainedModel:
    """The tiny random model `name` of :data:`SEEING` or :data:`BLIND`.

    Raises:
        UnknownNameError: no such model.
    """
    return _architecture(name)(seed)


def image_prompts(name: str, images: Sequence[int] = (1,), seed: int = 0, question: int = 0) -> dict[str, Tensor]:
    """Arguments of ``generate`` for a row of each number of `images`: random text, the images, and a text about them.

    Args:
        seed: of the images, and of the text in front of each.
        question: of the text behind them.
    """
    made, texts = _architecture(name), []
    for row, count in enumerate(images):
        text = _words(5 + row, seed * 100 + row)
        for image in range(count):
            text += [BEGIN, *[IMAGE] * made.tokens, END, *_words(2, seed * 100 + 50 + image)]
        texts.append(text + _words(QUESTIONS[row % len(QUESTIONS)], 7000 + question * 100 + row))
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if made.types:
        inputs[made.types] = (ids == IMAGE).long()
    generator = torch.Generator().manual_seed(seed)
    if made.by_row and any(images):
        every = torch.zeros(len(images), max(images), 3, 28, 28)
        for row, count in enumerate(images):
            every[row, :count] = made.pixels(count, generator)["pixel_values"]
        return inputs | {"pixel_values": every}
    return inputs | (made.pixels(sum(images), generator) if any(images) else {})


def _words(count: int, seed: int) -> list[int]:
    """Tokens of text; a few of them come again."""
    half = torch.randint(5, 100, ((count + 1) // 2,), generator=torch.Generator().manual_seed(seed)).tolist()
    return (half * 2)[:count]


def _architecture(name: str) -> SeeingArchitecture:
    every = {**SEEING, **BLIND}
    if name not in every:
        raise UnknownNameError("tiny model that sees", name, every)
    return every[name]
