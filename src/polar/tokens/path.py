"""The token path of one served model: from a request to prompt ids, from sampled ids to an answer.

Sync, CPU only and safe to use from several threads; keeps no session (that is `History`). In mode `tokens` prompts are rendered or bridged
here; in mode `messages` the engine renders, and `settle` compares afterwards. Knows no HTTP, no provider and no store.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import renderers

from polar.chat import ChatRequest, Image, JsonObject, Message, Part, Text, Thinking, Tool, join_parts
from polar.conversation import fold_system, pair_results
from polar.engines.base import Generation
from polar.errors import ConfigError, ContextOverflow
from polar.records import Break, Cause, Completion, Ids, Mode
from polar.tokens import fingerprint, pointers, restore
from polar.tokens.drift import Reason, find_break, refine
from polar.tokens.live import LiveReader
from polar.tokens.plan import Keys, Known, Match, Plan, Reading
from polar.tokens.reading import (
    answer_from,
    client_logprobs,
    message_from,
    parse,
    read_engine_message,
)
from polar.tokens.rendering import Rendering, renderer_name, template_arguments

IMAGE_PLACEHOLDER = "[image left out: this model reads text only]"
ThinkingRetention = Literal["all", "tool_cycle", "template"]
_RENDERINGS_KEPT = 16


class TokenPath:
    """Settings that hold for every call of one model.

    `tokenizer`: anything with the surface of `polar.tokens.tokenizer.Tokenizer`, or `None` in mode `messages`. `renderer`: a name of the
    renderers library, or `None` to tell it by the model's name or template (mode `tokens` only; raises `ConfigError` where that fails).
    `bridging` off renders every prompt afresh (to measure what bridging saves). `text_only`: images become a placeholder text;
    otherwise a conversation with an image runs in mode `messages`. `context`: the model's length in tokens, prompt and answer.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        *,
        model: str,
        renderer: str | None,
        mode: Mode,
        thinking_retention: ThinkingRetention = "all",
        bridging: bool = True,
        text_only: bool = True,
        context: int | None = None,
    ) -> None:
        if mode == "tokens" and tokenizer is None:
            raise ConfigError("mode tokens needs the model's tokenizer; give --tokenizer DIR, or use mode messages")
        self.tokenizer = tokenizer
        self.model = model
        self.mode: Mode = mode
        self.thinking_retention = thinking_retention
        self.bridging = bridging
        self.text_only = text_only
        self.context = context
        self.renderer = renderer_name(tokenizer, model=model, renderer=renderer) if mode == "tokens" else None
        self._renderings: OrderedDict[bytes, Rendering] = OrderedDict()
        self._lock = threading.Lock()
        self._model_part = fingerprint.part(model.encode(), (self.renderer or "").encode(), thinking_retention.encode())
        default = self._rendering({}) if self.renderer is not None else None
        self.stop_token_ids: tuple[int, ...] = default.stop_token_ids if default is not None else ()
        self.provenance: JsonObject = {
            "mode": mode,
            "tokenizer_hash": getattr(tokenizer, "hash", None),
            "template_hash": getattr(tokenizer, "template_hash", None),
            "renderer": self.renderer,
            "renderers_version": renderers.__version__ if self.renderer is not None else None,
            "renderer_settings": default.settings if default is not None else None,
            "thinking_retention": thinking_retention,
            "bridging": bridging,
        }

    # --- a call's way in ---------------------------------------------------------------------------------------

    def normalise(self, request: ChatRequest, secret: bytes) -> ChatRequest:
        """Puts results after their calls, folds system messages, drops thinking under a signature that is not this session's, puts
        placeholders for images.

        Thinking without a signature stays as plain reasoning. Nothing else is touched.
        """
        messages = tuple(self._normalise(message, secret) for message in fold_system(pair_results(request.messages)))
        return replace(request, messages=messages)

    def keys(self, request: ChatRequest, known: Known | None = None) -> Keys:
        """Root and running fingerprints of a normalised request: one pass over its text, or over what is new in it where `known` is an
        earlier request of the same conversation. The result is the same."""
        messages = request.messages
        head = self._model_part + fingerprint.tools_part(request.tools) + self._settings_part(request)
        if known is not None and messages and known.messages[:1] == messages[:1]:
            root = head + known.keys.root[24:]
        else:
            system = messages[0].text if messages and messages[0].role == "system" else ""
            root = head + fingerprint.part(system.encode("utf-8", "surrogatepass"))
        strict: list[bytes] = []
        loose: list[bytes] = []
        strict_now, loose_now = root, fingerprint.START
        if known is not None and root == known.keys.root:
            pairs = zip(messages, known.messages, strict=False)
            same = next((place for place, (new, old) in enumerate(pairs) if new != old), min(len(messages), len(known.messages)))
            if same:
                strict, loose = list(known.keys.strict[:same]), list(known.keys.loose[:same])
                strict_now, loose_now = strict[-1], loose[-1]
        for message in messages[len(strict) :]:
            digest = fingerprint.message_digest(message)
            strict_now = fingerprint.extend(strict_now, digest)
            if message.role != "system":
                loose_now = fingerprint.extend_loose(loose_now, digest)
            strict.append(strict_now)
            loose.append(loose_now)
        return Keys(root, tuple(strict), tuple(loose))

    def assemble(self, request: ChatRequest, keys: Keys, match: Match, parent: Completion | None, *, mode: Mode | None = None) -> Plan:
        """The prompt of a normalised request that was matched to `parent` (`match.parent`, in full). `mode` overrides the path's own for
        this one call (forced tool choice, say, is the engine's business).

        Raises `ContextOverflow` if the prompt leaves no room for a single token.
        """
        if parent is None:
            match = Match(tags=match.tags)
        elif match.cause is not None:
            match = refine(match, request, parent)
            parent = parent if match.parent is not None else None
        shared = match.shared
        if parent is not None:
            recorded = (*parent.messages, parent.answer)
            if match.cause is not None:
                shared = min(shared, restore.common_messages(request.messages[:shared], recorded))
            request = replace(request, messages=restore.restore(request.messages, recorded, shared))
        mode = "messages" if request.has_images else mode or self.mode
        begun = ""
        if request.begun and mode == "tokens" and self._rendering(template_arguments(self.renderer or "", request)).markers is not None:
            # in a format without marks (Harmony) an answer's text may not be where the prompt ends
            begun = request.messages[-1].text
            request = replace(request, messages=request.messages[:-1])
            keys = Keys(keys.root, keys.strict[:-1], keys.loose[:-1])
            shared = min(shared, len(request.messages))
        plan = Plan(request, keys, mode, None, match.parent, shared, tags=set(match.tags), cause=match.cause, detail=match.detail)
        plan.begun = begun
        if begun:
            plan.tags.add("prefilled")
        if mode == "messages":
            if parent is not None and plan.cause is None and parent.mode == "tokens":
                plan.cause = Cause.IMAGE if request.has_images else Cause.RENDERER_REFUSED
                plan.detail = "this call's prompt is rendered by the engine"
            return plan
        self._write_prompt(plan, match, parent)
        assert plan.prompt_ids is not None
        if self.context is not None and len(plan.prompt_ids) >= self.context:
            raise ContextOverflow(
                f"the prompt has {len(plan.prompt_ids)} tokens, but the model's context is {self.context} tokens",
                prompt_tokens=len(plan.prompt_ids),
                limit=self.context,
            )
        return plan

    def settle(self, plan: Plan, generation: Generation, parent: Completion | None) -> Break | None:
        """Mode `messages`: the break between the engine's prompt and the parent's ids, named; `None` if it extends them, or if ids are
        missing.

        Raises nothing. Every difference has a cause: what the fingerprints gave, else what the text around it tells, else what templates
        are known to do to such a history.
        """
        if plan.mode == "tokens":
            return plan.broken
        if parent is None or parent.ids is None or generation.prompt_ids is None or plan.parent is None:
            return None
        return find_break(generation.prompt_ids, parent, Reason(plan.cause, Cause.RENDERER_REFUSED, plan.detail), self.tokenizer)

    def render(self, request: ChatRequest) -> Ids:
        """int32[n]: the prompt of a normalised request rendered afresh (for comparison with the engine's own). Raises `ConfigError`
        without a renderer."""
        if self.renderer is None:
            raise ConfigError("mode messages renders no prompts")
        return self._rendering(template_arguments(self.renderer, request)).render(request.messages, request.tools)

    def render_ids(self, messages: Sequence[Message], tools: Sequence[Tool], thinking: bool | None) -> Ids:
        """As `render`, of a bare conversation: what the start-up check (`polar.engines.check`) compares with the engine's own."""
        return self.render(ChatRequest(self.model, tuple(messages), tools=tuple(tools), thinking=thinking))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included; empty without a tokenizer. For `polar.engines.check`."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode([int(one) for one in ids], skip_special_tokens=False))

    def count(self, request: ChatRequest) -> int:
        """Prompt tokens of a normalised request: exact with a renderer; without one, the tokens of its texts and tools alone (or a
        quarter of their characters without a tokenizer), for when the engine cannot be asked."""
        if self.renderer is not None and not request.has_images:
            return len(self.render(request))
        texts = [tool.description or "" for tool in request.tools] + [str(tool.parameters) for tool in request.tools]
        for message in request.messages:
            texts += [message.text, message.reasoning, *(call.name + call.arguments for call in message.tool_calls)]
        if self.tokenizer is None:
            return sum(len(text) for text in texts) // 4 + 4 * len(request.messages)
        return sum(len(self.tokenizer.encode(text)) for text in texts if text) + 4 * len(request.messages)

    # --- and its way back --------------------------------------------------------------------------------------

    def read(self, plan: Plan, generation: Generation, ref: str) -> Reading:
        """The answer of a generation; `ref` is its completion's reference, from which its tool calls get their ids."""
        calls_allowed = bool(plan.request.tools) and plan.request.tool_choice.mode != "none"
        if plan.mode == "tokens":
            rendering = self._rendering(template_arguments(self.renderer or "", plan.request))
            ids = [] if generation.token_ids is None else generation.token_ids.tolist()
            stop = generation.stop if isinstance(generation.stop, str) else None
            parsed = parse(
                rendering,
                self.tokenizer,
                ids,
                prompt=plan.prompt_ids,
                tools=plan.request.tools,
                stop_string=stop,
                calls_allowed=calls_allowed,
            )
        else:
            parsed = read_engine_message(generation, self.tokenizer, calls_allowed=calls_allowed)
        message = message_from(parsed, ref)
        whole = replace(message, content=plan.begun + message.text) if plan.begun else message
        prompt = plan.prompt_ids if plan.mode == "tokens" else generation.prompt_ids
        most = plan.request.top_logprobs
        logprobs = None if most is None else client_logprobs(generation, self.tokenizer, frozenset(self.stop_token_ids), most)
        answer = answer_from(generation, message, prompt=prompt, parsed=parsed, logprobs=logprobs)
        digest = fingerprint.message_digest(whole)
        strict = plan.keys.strict[-1] if plan.keys.strict else plan.keys.root
        loose = plan.keys.loose[-1] if plan.keys.loose else fingerprint.START
        return Reading(
            answer,
            whole,
            fingerprint.extend(strict, digest),
            fingerprint.extend_loose(loose, digest),
            parsed.tags,
            parsed.thinking_tokens,
            fingerprint.thinking_hash(fingerprint.thought(message)),
        )

    def live(self, plan: Plan) -> LiveReader:
        """A reader for the answer of `plan` while it is being sampled (mode `tokens`)."""
        rendering = self._rendering(template_arguments(self.renderer or "", plan.request))
        prefilled = rendering.opens_thinking(plan.prompt_ids)
        return LiveReader(self.tokenizer, rendering.markers, prefilled=prefilled, stop=plan.request.sampling.stop)

    # --- parts -------------------------------------------------------------------------------------------------

    def _write_prompt(self, plan: Plan, match: Match, parent: Completion | None) -> None:
        request = plan.request
        rendering = self._rendering(template_arguments(self.renderer or "", request))
        refusal = ""
        if (
            parent is not None
            and match.cause is None
            and self.bridging
            and parent.prompt_ids is not None
            and parent.sampled_ids is not None
        ):
            new = request.messages[match.shared :]
            plan.prompt_ids, refusal = rendering.bridge(parent.prompt_ids, parent.sampled_ids, new, request.tools, parent.answer)
            plan.bridged = plan.prompt_ids is not None
        if plan.prompt_ids is None:
            plan.prompt_ids = rendering.render(request.messages, request.tools)
        if plan.begun and self.tokenizer is not None:
            text = "\n</think>\n\n" + plan.begun if rendering.opens_thinking(plan.prompt_ids) else plan.begun
            plan.prompt_ids = np.concatenate([plan.prompt_ids, np.array(self.tokenizer.encode(text), np.int32)])
        if plan.bridged or parent is None or parent.ids is None:
            return
        if match.cause is not None:
            reason = Reason(match.cause, match.cause, match.detail)
        elif refusal:
            structural = self.thinking_retention == "all"
            reason = Reason(Cause.RENDERER_REFUSED if structural else None, Cause.RENDERER_REFUSED, refusal)
        else:
            reason = Reason(None, Cause.BRIDGING_OFF)
        plan.broken = find_break(plan.prompt_ids, parent, reason, self.tokenizer)
        if plan.broken is not None:
            plan.cause, plan.detail = plan.broken.cause, plan.broken.detail

    def _normalise(self, message: Message, secret: bytes) -> Message:
        if message.thinking:
            kept = tuple(block for block in message.thinking if _ours(block, secret))
            if len(kept) != len(message.thinking):
                message = replace(message, thinking=kept)
        if self.text_only and not isinstance(message.content, str):
            parts: list[Part] = [Text(IMAGE_PLACEHOLDER) if isinstance(part, Image) else part for part in message.content]
            message = replace(message, content=join_parts(parts))
        return message

    def _settings_part(self, request: ChatRequest) -> bytes:
        if self.renderer is not None:
            return self._rendering(template_arguments(self.renderer, request)).settings_part
        return fingerprint.part(fingerprint.canonical_value([request.thinking, request.effort]))

    def _rendering(self, arguments: JsonObject) -> Rendering:
        """One renderer per set of template arguments, kept."""
        assert self.renderer is not None
        key = fingerprint.canonical_value(arguments)
        with self._lock:
            known = self._renderings.get(key)
            if known is None:
                known = Rendering(self.tokenizer, self.renderer, thinking_retention=self.thinking_retention, arguments=arguments)
                self._renderings[key] = known
                while len(self._renderings) > _RENDERINGS_KEPT:
                    self._renderings.popitem(last=False)
            self._renderings.move_to_end(key)
            return known


def _ours(block: Thinking, secret: bytes) -> bool:
    return block.signature is None or pointers.find(secret, block.signature) is not None
