"""Designs of tiny random models that read images or sounds, and random images and sounds as their inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from .models import VOCAB, WINDOW, created

#: IMAGE is the placeholder token for a part of an image, or of a sound in models that read sounds. VIDEO and OTHER are further
#: placeholder tokens. BEGIN and END are text tokens around placeholders.
IMAGE, VIDEO, OTHER, BEGIN, END = 120, 121, 122, 118, 119
#: Auto classes of transformers, each with the config classes for which it has a model.
_MODELS = (
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
    (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
)
Pixels = Callable[[int, torch.Generator], dict[str, Tensor]]


@dataclass(frozen=True)
class SeeingArchitecture:
    """Builds one tiny model that reads images or sounds.

    Attributes:
        model_type: transformers' name of the design.
        options: config values.
        tokens: number of placeholder tokens of one image or sound.
        pixels: takes a number of images or sounds and a random generator, and returns the model's inputs for them.
        types: name of the argument that marks image tokens; None if there is none.
        by_row: whether ``pixel_values`` has a dimension for rows of the batch, before the dimension for images.
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
        """Creates the model, in evaluation mode. Equal seeds give equal weights. The global random generator is not changed."""
        config = AutoConfig.for_model(self.model_type, **self.options)
        auto = next(auto for auto, designs in _MODELS if type(config) in designs)
        return created(auto, config, self.embedding, seed)


#: Layer sizes of image encoders, sound encoders and text models.
_SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def _text(model_type: str | None = None, **others: Any) -> dict[str, Any]:
    plain = _SIZES | dict(
        vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )  # fmt: skip
    return plain | ({"model_type": model_type} if model_type else {}) | others


def _tower(model_type: str | None = None, **others: Any) -> dict[str, Any]:
    plain = _SIZES | dict(image_size=28, patch_size=7)
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
    """Inputs in the format of the Qwen family: images of 4 x 6 patches. Four patches make a token."""
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


def _sound(
    frames: int = 40, mask: str | None = "input_features_mask", masked: int | None = None, flags: bool = False,
    last: bool = False,
) -> Pixels:  # fmt: skip
    """Returns a function that makes sounds of `frames` frames with 8 features each.

    Args:
        mask: name of the argument that distinguishes frames from padding; None if there is none.
        masked: length of the mask; None: the number of frames.
        flags: whether the mask has bools instead of numbers.
        last: whether the features are the last dimension.
    """

    def sounds(count: int, generator: torch.Generator) -> dict[str, Tensor]:
        shape = (count, frames, 8) if last else (count, 8, frames)
        made = {"input_features": torch.randn(shape, generator=generator)}
        ones = torch.ones(count, masked or frames, dtype=torch.bool if flags else torch.int64)
        return made | ({mask: ones} if mask else {})

    return sounds


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
_GEMMA4 = _text(
    "gemma4_text", head_dim=8, global_head_dim=16, num_hidden_layers=4, sliding_window=WINDOW, layer_types=_MIXED * 2,
    num_kv_shared_layers=2, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8,
)  # fmt: skip

#: Builders of the designs for which the decoding loop supports prompts with images, by name. A builder takes an optional seed.
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
        # The tokens of an image attend to each other.
        "gemma3": SeeingArchitecture(
            "gemma3",
            dict(text_config=_text("gemma3_text", head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=_MIXED),
                 vision_config=_SIGLIP, mm_tokens_per_image=4, boi_token_index=BEGIN, eoi_token_index=END, **_INDEX),
            4, _square, "token_type_ids", embedding=0.03,
        ),
        "gemma4": SeeingArchitecture(
            "gemma4",
            dict(text_config=_GEMMA4 | {"use_bidirectional_attention": "vision"},
                 vision_config=_SIZES | dict(num_key_value_heads=4, head_dim=8, pooling_kernel_size=2, patch_size=4,
                                             position_embedding_size=64),
                 audio_config=None, video_token_id=VIDEO, audio_token_id=117, boi_token_id=BEGIN, eoi_token_id=END,
                 boa_token_id=115, eoa_token_index=116, **_TOKEN),
            4, _placed_patches, "mm_token_type_ids", embedding=0.03,
        ),
        # An image occupies fewer positions than it has tokens.
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

_EAR = _SIZES | dict(num_mel_bins=8, max_source_positions=20)
_WIDE_EAR = _EAR | {"intermediate_size": 128}  # 4 frames of 32 features make a token
_OMNI_EAR = dict(
    d_model=32, encoder_ffn_dim=48, encoder_layers=2, encoder_attention_heads=4, num_mel_bins=8, max_source_positions=64, output_dim=32
)  # fmt: skip
_AUDIO = {"audio_token_id": IMAGE}
_OMNI = dict(vision_start_token_id=110, vision_end_token_id=111, audio_start_token_id=BEGIN, audio_end_token_id=END)


def _hearing(
    model_type: str, text: dict[str, Any], ear: dict[str, Any], tokens: int, sound: Pixels, **others: Any
) -> SeeingArchitecture:
    own = dict(text_config=text, audio_config=ear, tie_word_embeddings=False)
    return SeeingArchitecture(model_type, own | _AUDIO | others, tokens, sound)


#: Builders of the designs for which the decoding loop supports prompts with sounds, by name. A builder takes an optional seed.
HEARING: Mapping[str, SeeingArchitecture] = MappingProxyType(
    {
        "qwen2_audio": SeeingArchitecture(
            "qwen2_audio",
            dict(text_config=_text("qwen2"), audio_config=_OMNI_EAR | {"model_type": "qwen2_audio_encoder", "max_source_positions": 20},
                 audio_token_index=IMAGE), 10, _sound(mask="feature_attention_mask"),
        ),
        "voxtral": _hearing("voxtral", _text("llama", head_dim=8), _WIDE_EAR, 5, _sound(mask=None)),
        "audioflamingo3": _hearing("audioflamingo3", _text("qwen2"), _EAR, 10, _sound()),
        "glmasr": _hearing("glmasr", _text("llama"), _WIDE_EAR, 5, _sound()),
        "qwen2_5_omni": SeeingArchitecture(
            "qwen2_5_omni_thinker",
            dict(text_config=_text(rope_parameters=_ROTARY), audio_config=_OMNI_EAR | {"n_window": 10}, audio_token_index=IMAGE,
                 vision_config=_PATCHES | _MLP | {"window_size": 16, "fullatt_block_indexes": [1]}, image_token_index=OTHER,
                 video_token_index=VIDEO, **_OMNI), 10, _sound(mask="feature_attention_mask"),
        ),
        "qwen3_omni": SeeingArchitecture(
            "qwen3_omni_moe_thinker",
            dict(text_config=_text(rope_parameters=_ROTARY, head_dim=8, num_experts=4, num_experts_per_tok=2,
                                   moe_intermediate_size=24),
                 audio_config=_OMNI_EAR | {"n_window": 50, "downsample_hidden_size": 8},
                 vision_config=_PATCHES | _MLP | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
                 image_token_id=OTHER, video_token_id=VIDEO, **_AUDIO, **_OMNI), 5, _sound(mask="feature_attention_mask"),
        ),
        "qwen3_asr": _hearing(
            "qwen3_asr", _text("qwen3", head_dim=8), _OMNI_EAR | {"n_window": 50, "downsample_hidden_size": 8}, 13, _sound(100),
            timestamp_token_id=OTHER, pad_token_id=0, eos_token_id=1,
        ),
        "granite_speech": SeeingArchitecture(
            "granite_speech",
            dict(text_config=_text("granite"), audio_token_index=IMAGE, has_lora_adapter=False, tie_word_embeddings=False,
                 encoder_config=dict(input_dim=8, num_layers=2, hidden_dim=32, num_heads=4, output_dim=12, context_size=10,
                                     max_pos_emb=64, conv_kernel_size=3),
                 projector_config=dict(model_type="blip_2_qformer", hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                                       intermediate_size=48, encoder_hidden_size=32, cross_attention_frequency=1)),
            6, _sound(30, masked=6, flags=True, last=True),
        ),
        "gemma4_audio": SeeingArchitecture(
            "gemma4",
            dict(text_config=_GEMMA4, vision_config=None,
                 audio_config=dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, subsampling_conv_channels=[8, 4],
                                   output_proj_dims=32, attention_chunk_size=4, attention_context_left=5),
                 image_token_id=OTHER, video_token_id=VIDEO, boi_token_id=110, eoi_token_id=111, boa_token_id=BEGIN,
                 eoa_token_index=END, **_AUDIO), 5, _sound(20, flags=True, last=True), embedding=0.03,
        ),
    }
)  # fmt: skip

#: Designs for which prompts with images or sounds are rejected: their text attends to later tokens, or their layers read the image or
#: sound again in every step.
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
        "voxtral_realtime": _hearing(
            "voxtral_realtime", _text("voxtral_realtime_text", head_dim=8),
            _SIZES | dict(head_dim=8, num_mel_bins=8, max_position_embeddings=512), 0, _sound(512, mask=None), downsample_factor=4,
            audio_length_per_tok=8,
        ),
    }
)  # fmt: skip
