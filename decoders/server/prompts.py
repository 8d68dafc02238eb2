"""Renders conversations to prompts with the tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..constraints import ThinkingMarkers
from ..errors import shortened
from ..prompts.templates import CallStyle, ChatStyle
from ..scheduling import special_tokens
from .bodies import Message, Tool
from .histories import JOINT, Links, answers_as_texts, call_of, one_by_one
from .images import image_of
from .refusals import Refusal, log, wrong


class Conversations:
    """Renders conversations to prompts.

    Args:
        template: replaces the tokenizer's chat template.
        thinking: begin and end markers of thoughts; None: the known markers of the tokenizer or the template.
        tool_format: name of the format of function calls; None: the template's format.
        processor: the processor of a vision model; None: messages with images are refused.

    Attributes:
        style: how the template writes calls.
        thinking: the markers of thoughts; None if they are not known.
        messages: which roles' messages the template renders, and in which form it takes their content.
        special: the special tokens by name.
        reads_effort: whether the template uses the variable ``reasoning_effort``.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None = None, thinking: tuple[str, str] | None = None,
        tool_format: str | None = None, processor: Any = None,
    ) -> None:  # fmt: skip
        if template is None and not tokenizer.chat_template:
            template = getattr(processor, "chat_template", None)
        self.tokenizer, self.template, self.processor = tokenizer, template, processor
        self.thinking = ThinkingMarkers(*thinking) if thinking is not None else ThinkingMarkers.of(tokenizer, template)
        self.special = special_tokens(tokenizer)
        source = str(template or tokenizer.chat_template or "")
        self.reads_effort = "reasoning_effort" in source
        style = ChatStyle.of(self._render if self.has_template else None, [*self.special], source, tool_format)
        self.style, self.messages = style.calls, style.messages
        if "user" in self.messages.unread:
            log.warning(
                "the chat template refuses a conversation of one user message, or leaves its text out, both as a string and as "
                "parts: /v1/chat/completions may refuse requests, or answer without the text of user messages"
            )

    @property
    def has_template(self) -> bool:
        return bool(self.template or self.tokenizer.chat_template)

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: dict[str, Any], images: list[Any] | None = None
    ) -> str:  # fmt: skip
        """Renders a conversation to text, which ends where the content of the model's answer begins.

        Args:
            variables: additional variables for the template.
            images: a list to which the messages' images are added; None: images are refused.

        Raises:
            Refusal: there is no template, it rejects this conversation, or a variable or a part of a message is invalid.
        """
        if not self.has_template:
            message = "this model has no chat template: use /v1/completions, or start the server with --chat-template"
            raise Refusal(400, message, param="messages", code="no_chat_template")
        listed = [tool.model_dump(exclude_none=True) for tool in tools]
        for tool in listed:
            # Templates concatenate the description with other text, so it must be a string.
            tool["function"].setdefault("description", "")
        if self.processor is None or "user" in self.messages.unread:
            images = None
        links = Links(self.style)
        plain = [self._plain(message, place, images, links) for place, message in enumerate(messages)]
        if self.style.one_call:
            plain = one_by_one(plain)
        if not self.style.reads_calls or "tool" in self.messages.unread:
            plain = answers_as_texts(plain)
        if listed and not self.style.reads_tools:
            plain = _introduced(plain, listed, self.style)
            listed = []
        if "system" in self.messages.unread:
            plain = _without_system(plain)
        plain = [
            message | {"content": self.messages.content(message["role"], message["content"])}
            if isinstance(message["content"], str)
            else message
            for message in plain
        ]
        forbidden = {"messages", "tools", "tokenize", "add_generation_prompt", "chat_template"} & variables.keys()
        if forbidden:
            message = f"chat_template_kwargs must not hold {', '.join(sorted(forbidden))}"
            raise Refusal(400, message, param="chat_template_kwargs", code="invalid_value")
        try:
            return self._render(plain, listed, True, variables)
        except Exception as error:  # templates raise exceptions of any class
            message = f"the chat template refuses this conversation: {error}"
            raise Refusal(400, message, param="messages", code="chat_template_error") from error

    def ids(self, text: str) -> list[int]:
        """The token ids of a rendered text. The tokenizer adds no special tokens, because the template has written them."""
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return tokens

    def inputs(self, text: str, images: Sequence[Any]) -> tuple[list[int], dict[str, Any]]:
        """The token ids of a rendered text, and the model's inputs for `images` by name (empty without images).

        Raises:
            Refusal: the processor rejects the images.
        """
        if not images:
            return self.ids(text), {}
        processor: Any = self.processor
        try:
            inputs = dict(processor(text=[text], images=[list(images)], add_special_tokens=False, return_tensors="pt"))
        except Exception as error:  # processors raise exceptions of any class
            message = f"the model's processor refuses these images: {error}"
            raise Refusal(400, message, param="messages", code="invalid_image") from error
        ids = inputs.pop("input_ids")[0].tolist()
        inputs.pop("attention_mask", None)
        return ids, inputs

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, ask: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:  # fmt: skip
        options: dict[str, Any] = {"tools": tools or None, "tokenize": False, "add_generation_prompt": ask, **variables}
        if self.template:
            options["chat_template"] = self.template
        text: Any = self.tokenizer.apply_chat_template(messages, **options)
        return str(text)

    def _plain(self, message: Message, place: int, images: list[Any] | None, links: Links) -> dict[str, Any]:
        role = "system" if message.role == "developer" else message.role
        content = _text_of(message.content, place, images if role == "user" else None)
        plain: dict[str, Any] = {"role": role, "content": content}
        calls = [call_of(call, place, number) for number, call in enumerate(message.tool_calls or [])]
        if calls and not self.style.reads_calls:
            texts = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments, _, _ in calls]
            try:
                written = self.style.format.written(texts)
            except RecursionError as error:
                raise wrong(f"messages.{place}.tool_calls", "the arguments are nested too deeply") from error
            plain["content"] = f"{content}\n{written}".strip()
        if role == "assistant" and not content and not calls and self.messages.needs_text:
            plain["content"] = " "
        if not self.style.reads_calls:
            return plain
        thought = message.reasoning_content
        if calls:
            plain["tool_calls"] = [
                self.style.call(name, arguments, links.called(name, id), text) for name, arguments, text, id in calls
            ]
            if self.style.one_text and thought and content:
                thought, plain["content"] = f"{thought}{JOINT}{content}", ""
        if thought is not None:  # templates read the thought by one of these two names
            plain |= {"reasoning_content": thought, "thinking": thought}
        if role == "tool":
            plain |= links.answered(message.tool_call_id)
        if message.name is not None:
            plain["name"] = message.name
        return plain


def _introduced(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], style: CallStyle
) -> list[dict[str, Any]]:  # fmt: skip
    """The conversation with a system message that lists the functions and shows how to call one."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    shape = style.format.written([("…", "{…}" if style.format.notation is None else '{"…": "…"}')])
    text = f"You may call functions. To call one, answer with nothing but {shape}. The functions:\n{listed}"
    if messages and messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with each system message merged into the next user message, or turned into a user message at the end."""
    conversation, waiting = list[dict[str, Any]](), list[str]()
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user":
            content, before = message["content"], "\n\n".join(waiting)
            if not isinstance(content, str):
                content = [{"type": "text", "text": f"{before}\n\n"}, *content] if waiting else content
            else:
                content = "\n\n".join([*waiting, content])
            conversation.append(message | {"content": content})
            waiting = []
        else:
            conversation.append(message)
    return [*conversation, {"role": "user", "content": "\n\n".join(waiting)}] if waiting else conversation


def _text_of(
    content: str | list[dict[str, Any]] | None, place: int, images: list[Any] | None
) -> str | list[dict[str, Any]]:
    """The text of a message or, if it contains images, the list of its parts for the template.

    Args:
        images: a list to which the images are added; None: images are refused.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = list[dict[str, Any]]()
    for number, part in enumerate(content):
        param = f"messages.{place}.content.{number}"
        if part.get("type") == "image_url" and images is not None:
            images.append(image_of(part, param, images))
            parts.append({"type": "image"})
            continue
        if part.get("type") not in ("text", "refusal") or not isinstance(part.get(part["type"]), str):
            read = "text" if images is None else "text and image_url"
            given = "no images" if part.get("type") == "image_url" else f"not {shortened(repr(part.get('type')))}"
            raise wrong(param, f"only parts of type {read} are supported, {given}", "unsupported_content")
        parts.append({"type": "text", "text": part[part["type"]]})
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)
