"""What the strategies with a second model have in common: where the model comes from."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, InstanceOf, PlainSerializer
from transformers import PreTrainedModel

from ..errors import UnsupportedError
from ..settings import Settings
from ..strategy import Context, Strategy
from .budget import draft_budget
from .draft_tree import Beam

#: Nodes of a tree where nothing says otherwise, root excluded.
TREE_NODES = 24

#: A path or hub name, or a loaded model (which shows up as its name in JSON).
DraftModel = Annotated[
    str | InstanceOf[PreTrainedModel] | None,
    PlainSerializer(lambda model: model if isinstance(model, str | None) else model.config.name_or_path),
]


class DraftModelSettings(Settings):
    """Settings of every strategy that drafts with a second model."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    draft_model: DraftModel = Field(
        None, description="Draft model: a path, or a loaded model. None: the call's assistant_model."
    )


class TreeSettings(Settings):
    """Settings of those whose drafts may be trees expanded level by level."""

    nodes: int | None = Field(
        None,
        ge=2,
        le=256,
        description="Node budget of a tree, root excluded. None: what the measured costs of a step allow, 24 where none are known.",
    )
    children: int = Field(4, ge=2, le=32, description="Most continuations of a node of a tree.")
    beam: Beam = 4


class DraftTreeSettings(TreeSettings, DraftModelSettings):
    """The same for those with a second model."""


class DraftModelStrategy(Strategy):
    """Base of strategies with a draft model: ``assistant_model=`` of the call, or ``draft_model`` of the settings."""

    settings_class: ClassVar[type[Settings]] = DraftModelSettings
    needs_assistant = True

    def __init__(self, settings: Settings | None = None, /, **values: Any) -> None:
        super().__init__(settings, **values)
        # Seen by `generate`, which then neither asks for an assistant model nor takes one.
        self.needs_assistant = type(self).needs_assistant and getattr(self.settings, "draft_model", None) is None

    def draft_model(self, context: Context) -> PreTrainedModel | str:
        """The model to draft with.

        Raises:
            UnsupportedError: a stage has none: it drafts for the draft model, and the call brings only that.
        """
        if self.settings.draft_model is not None:
            return self.settings.draft_model
        if context.level > 0 or context.assistant_model is None:
            raise UnsupportedError(f"{self.name!r} as a stage needs a model of its own: set its draft_model")
        return context.assistant_model

    def tree_nodes(self, context: Context) -> int:
        """Node budget of a tree, root excluded."""
        return draft_budget(context, self.settings.nodes, TREE_NODES)
