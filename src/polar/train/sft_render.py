"""Conversations to ids and a mask, as a rollout would have made them. Knows no files.

An answer's ids are what the model's renderer says that the model samples for it, its end of turn among them. What stands before an answer
is what the gateway would have sent: the first prompt as the template writes it, each further one a bridge from the turn before, so that
thinking stays where it was, whatever a template strips from the history. A conversation that cannot be bridged (assistant messages one
after another, or at its start) is rendered as the template writes the whole of it.

Text has lost what ids say: whether an answer was cut for length, and how its text was split into tokens. Rows with ids are the better data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from renderers import create_renderer
from renderers.base import build_training_sample
from renderers.configs import config_from_name

from polar.chat import Message, Tool
from polar.errors import ConfigError, InvalidRequest
from polar.records import Ids
from polar.tokens.rendering import Rendering, renderer_name, to_renderer
from polar.tokens.tokenizer import Tokenizer
from polar.trajectory.row import Mask

_SOMEONE = {"role": "user", "content": "."}


class Conversations:
    """Renders for one model. Raises `ConfigError` where no renderer is known for it."""

    def __init__(self, tokenizer: Tokenizer, renderer: str | None = None) -> None:
        try:
            name = renderer_name(tokenizer, model=tokenizer.name_or_path, renderer=renderer)
        except ConfigError as error:
            raise ConfigError(
                f"conversations need the model's renderer ({error}). Give --renderer, or export the rows with ids: polar export --as tokens"
            ) from error
        self._tokenizer = tokenizer
        self._rendering = Rendering(tokenizer, name, thinking_retention="all", arguments={})
        default = config_from_name(name)
        assert default is not None
        self._library = create_renderer(tokenizer, type(default)(thinking_retention="all"))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], trained: Sequence[bool]) -> tuple[Ids, Mask]:
        """int32[n] and bool[n]. `trained` is by message; only ids that a model would have sampled are trained, in those messages.

        Raises `ValueError` where the template refuses the conversation, or the renderer does not tell the model's ids from its own.
        """
        try:
            return self._bridged(messages, tools, trained) or self._whole(messages, tools, trained)
        except InvalidRequest as error:
            raise ValueError(error.message) from error

    def _bridged(self, messages: Sequence[Message], tools: Sequence[Tool], trained: Sequence[bool]) -> tuple[Ids, Mask] | None:
        """`None` where a prompt cannot be had from the one before."""
        answers = [place for place, message in enumerate(messages) if message.role == "assistant"]
        if not answers or answers[0] == 0:
            return None
        prompt: Ids | None = self._rendering.render(messages[: answers[0]], tools)
        masks: list[Mask] = []
        known = 0
        for place, following in zip(answers, [*answers[1:], None], strict=True):
            assert prompt is not None
            sampled = self._sampled(messages[place], prompt)
            masks += [np.zeros(len(prompt) - known, np.bool_), np.full(len(sampled), trained[place], np.bool_)]
            known = len(prompt) + len(sampled)
            if following is None:
                return np.concatenate([prompt, sampled]), np.concatenate(masks)
            prompt, _ = self._rendering.bridge(prompt, sampled, messages[place + 1 : following], tools, messages[place])
            if prompt is None:
                return None
        return None

    def _sampled(self, answer: Message, prompt: Ids) -> Ids:
        """What the model samples for the answer: the same wherever it stands. As a last word a template writes it with its thinking, even
        if that is empty; before another it writes no thinking. So it is rendered as what it is."""
        messages = [_SOMEONE, *to_renderer([answer])]
        if not answer.reasoning and not self._rendering.opens_thinking(prompt):
            messages.append(_SOMEONE)
        made = self._library.render(messages)
        if len(made.sampled_mask) != len(made.token_ids):
            raise ValueError(f"renderer {self._rendering.name} does not tell the model's ids from its own; use rows with ids")
        parts = zip(made.token_ids, made.message_indices, made.sampled_mask, strict=True)
        ids = [one for one, message, sampled in parts if sampled and message == 1]
        stops = self._rendering.stop_token_ids
        if stops and (not ids or ids[-1] not in stops):
            ids.append(stops[0])
        if self._rendering.opens_thinking(prompt):
            ids = self._without_opening(ids, prompt)
        return np.array(ids, np.int32)

    def _without_opening(self, ids: list[int], prompt: Ids) -> list[int]:
        """What is left to sample where the prompt has opened the thinking block already (Qwen3.5 and later)."""
        markers = self._rendering.markers
        assert markers is not None  # without them, nothing tells that thinking is open
        if not ids or ids[0] != markers.think or markers.think_end not in ids:
            return ids
        end = ids.index(markers.think_end)
        start = int(np.flatnonzero(prompt == markers.think)[-1])
        opened, thinking = self._tokenizer.decode(prompt[start + 1 :]), self._tokenizer.decode(ids[1:end])
        return self._tokenizer.encode(thinking.removeprefix(opened)) + ids[end:]

    def _whole(self, messages: Sequence[Message], tools: Sequence[Tool], trained: Sequence[bool]) -> tuple[Ids, Mask]:
        schemas = [tool.schema() for tool in tools] or None
        given = list(map(bool, trained))
        dicts = to_renderer(messages)
        made = build_training_sample(self._library, dicts, tools=schemas, ensure_final_stop=True, message_loss_mask=given)
        return np.array(made.token_ids, np.int32), np.array(made.loss_mask, np.bool_)
