"""Early exit (LayerSkip, Elhoushi et al. 2024, arXiv:2404.16710): the target's first layers draft, and all its layers verify."""

from __future__ import annotations

from pydantic import Field
from transformers import PreTrainedModel

from ..errors import UnsupportedError
from ..strategy import Context
from .speculative import ShapeSettings, Speculative


class EarlyExitSettings(ShapeSettings):
    """The exit layer, and the length and shape of drafts."""

    exit_layer: int | None = Field(
        None,
        ge=1,
        description="Number of the target's first layers that draft (the paper's E). None: a quarter of the target's layers, "
        "at least one.",
    )


class EarlyExit(Speculative):
    """The target's first layers, followed by its norm and output head, serve as a draft model for a chain or a tree.

    This is fast only for models that were trained for early exit: the first layers of other models seldom agree with the whole model.
    """

    name = "early_exit"
    summary = "The target's own first layers draft a chain or a tree; for checkpoints that were trained for it."
    settings_class = EarlyExitSettings
    hints = Speculative.hints | {"assistant_early_exit": "exit_layer"}
    needs_assistant = False

    def draft_model(self, context: Context) -> PreTrainedModel:
        """A draft model that consists of the target's first layers, last norm and output head.

        Raises:
            UnsupportedError: the strategy drafts for a draft model instead of the target.
        """
        if context.level > 0:
            raise UnsupportedError(
                f"{self.name!r} drafts with layers of the target, so it cannot draft for a draft model"
            )
        layer = self.settings.exit_layer
        return context.first_layers(max(context.decoder_layers // 4, 1) if layer is None else layer)

    def other_vocabulary(self, context: Context) -> None:
        """Always None: the first layers have the target's vocabulary."""
