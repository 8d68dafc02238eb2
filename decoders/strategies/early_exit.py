"""Early exit (LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710): the target's first layers draft, all of its layers verify."""

from __future__ import annotations

from pydantic import Field
from transformers import PreTrainedModel

from ..errors import UnsupportedError
from ..strategy import Context
from .speculative import ShapeSettings, Speculative


class EarlyExitSettings(ShapeSettings):
    """The exit layer, and the length and shape of drafts."""

    exit_layer: int | None = Field(
        None, ge=1, description="Layers that draft (the paper's E). None: a quarter of the target's, at least one."
    )


class EarlyExit(Speculative):
    """The target's first layers, with its own norm and head, draft a chain or a tree as a draft model does.

    It pays where the model was trained for early exit: other models' first layers seldom agree with the whole model.
    """

    name = "early_exit"
    summary = "The target's own first layers draft a chain or a tree; for checkpoints that were trained for it."
    settings_class = EarlyExitSettings
    hints = Speculative.hints | {"assistant_early_exit": "exit_layer"}
    needs_assistant = False

    def draft_model(self, context: Context) -> PreTrainedModel:
        """The first layers.

        Raises:
            UnsupportedError: the strategy is a stage, which does not draft for the target.
        """
        if context.level > 0:
            raise UnsupportedError(f"{self.name!r} leaves the target early and cannot be the stage of a draft model")
        layer = self.settings.exit_layer
        return context.first_layers(max(context.decoder_layers // 4, 1) if layer is None else layer)

    def other_vocabulary(self, context: Context) -> None:
        """Always None: the first layers have the target's vocabulary."""
