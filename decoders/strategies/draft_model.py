"""Base classes of strategies that draft with a second model. :attr:`decoders.Context.draft` opens the model."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, InstanceOf, PlainSerializer
from transformers import PreTrainedModel

from ..costs import draft_budget
from ..errors import UnsupportedError
from ..settings import Settings
from ..strategy import Context, Strategy
from .draft_tree import TREE_NODES, TreeSettings

__all__ = ["DraftModelSettings", "DraftModelStrategy", "DraftTreeSettings"]

#: A path, a Hub name, or a loaded model. A loaded model is serialized as its name.
DraftModel = Annotated[
    str | InstanceOf[PreTrainedModel] | None,
    PlainSerializer(lambda model: model if isinstance(model, str | None) else model.config.name_or_path),
]


class DraftModelSettings(Settings):
    """Settings of every strategy that drafts with a second model."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    draft_model: DraftModel = Field(
        None, description="Draft model: a folder, a Hub name, or a loaded model. None: the call's assistant_model."
    )


class DraftTreeSettings(TreeSettings, DraftModelSettings):
    """Settings of strategies that draft trees with a draft model."""


class DraftModelStrategy(Strategy):
    """Base of strategies with a draft model: ``assistant_model=`` of the call, or ``draft_model`` of the settings.

    Subclasses open the model in ``start``: ``context.draft(self.draft_model(context), ahead=…)`` returns a
    :class:`decoders.drafters.Drafter`.
    """

    settings_class: ClassVar[type[Settings]] = DraftModelSettings
    needs_assistant = True

    def __init__(self, settings: Settings | None = None, /, **values: Any) -> None:
        super().__init__(settings, **values)
        # With a draft model in the settings, `generate` neither requires nor accepts an assistant model.
        self.needs_assistant = type(self).needs_assistant and getattr(self.settings, "draft_model", None) is None

    def draft_model(self, context: Context) -> PreTrainedModel | str:
        """The model that drafts: `draft_model` of the settings, else the call's assistant model.

        Raises:
            UnsupportedError: the settings name no draft model, and there is no assistant model. A strategy that drafts for another
                draft model (a stage of `staged`) cannot use the call's assistant model.
        """
        if self.settings.draft_model is not None:
            return self.settings.draft_model
        if context.level > 0 or context.assistant_model is None:
            raise UnsupportedError(f"{self.name!r} as a stage needs its own model: set draft_model of {self.name}")
        return context.assistant_model

    def tree_nodes(self, context: Context) -> int:
        """Greatest number of nodes of a tree, root excluded: the setting ``nodes``, or as many as the costs of a step allow."""
        return draft_budget(context.costs, self.settings.nodes, TREE_NODES)
