"""Stored answers: what `previous_response_id` continues, and what retrieval and deletion by id see.

A response id is a pointer to a completion of the same session, so nothing is stored twice and another session's id is simply
unknown. An answer is shown again by the encoder that made it, from the completion on disk.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from polar.chat import Answer, ChatRequest, JsonObject, Message, Sampling, ToolCall, Usage
from polar.dialects import Dialect, Reply
from polar.errors import NotFound
from polar.gateway.sessions import SessionState
from polar.records import Completion
from polar.store.base import Store
from polar.tokens import pointers


class StoredResponses:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def resolved(self, state: SessionState, request: ChatRequest) -> ChatRequest:
        """The request with everything in it that is only referred to: `previous` conversation first, then item references."""
        request = await self._continued(state, request)
        references = frozenset(request.options.get("references", ()))
        if references:
            messages = tuple([message async for message in self._dereferenced(state, request.messages, references)])
            options = {name: value for name, value in request.options.items() if name != "references"}
            request = replace(request, messages=messages, options=options)
        return request

    async def _continued(self, state: SessionState, request: ChatRequest) -> ChatRequest:
        """The conversation of the `previous` response before the request's own messages.

        As the provider documents, instructions of the earlier call are not carried over; all other messages are.
        """
        if request.previous is None:
            return request
        completion = await self._find(state, request.previous, "previous_response_not_found", "previous_response_id")
        instructions = completion.options.get("instructions")
        earlier = list(completion.messages)
        if earlier and earlier[0].role == "system" and isinstance(instructions, str) and instructions:
            rest = earlier[0].text.removeprefix(instructions).lstrip("\n")
            earlier[:1] = [Message("system", rest)] if rest else []
        own = list(request.messages)
        head: list[Message] = []
        if request.options.get("instructions") and own and own[0].role == "system":
            head = [own.pop(0)]
        return replace(request, messages=(*head, *earlier, as_echoed(completion.answer), *own))

    async def _dereferenced(self, state: SessionState, messages: Sequence[Message], references: frozenset[str]) -> AsyncIterator[Message]:
        """References to items of one answer become that answer, once; in a turn that is partly sent whole, each becomes its item. One that
        is unknown is an error, as with the provider."""
        last: int | None = None
        for message in messages:
            named = [ref for ref in message.refs if ref in references]
            if not named:
                last = None
                yield message
            elif message.content or message.tool_calls or message.thinking:
                last = None
                completion = await self._find(state, named[0], param="input")
                yield _filled(message, as_echoed(completion.answer), named)
            else:
                for ref in named:
                    number = pointers.find(state.record.secret, ref)
                    if number is not None and number == last:
                        continue
                    completion = await self._find(state, ref, param="input")
                    last = completion.number
                    yield as_echoed(completion.answer)

    async def answered(self, state: SessionState, response_id: str) -> tuple[Reply, Answer]:
        """A stored response, to be encoded as its first caller got it: whole or as a stream."""
        completion = await self._find(state, response_id)
        reply = Reply(
            request=request_of(completion),
            ref=pointers.mint(state.record.secret, completion.number),
            created=int(completion.started),
            prompt_tokens=0 if completion.prompt_ids is None else len(completion.prompt_ids),
        )
        return reply, answer_of(completion)

    async def items(self, dialect: Dialect, state: SessionState, params: Mapping[str, str]) -> JsonObject:
        """The input items of a stored response, paged as `params` say."""
        return dialect.items(request_of(await self._find(state, params["response_id"])), params)

    async def forget(self, state: SessionState, response_id: str) -> None:
        """Makes it irretrievable by id. The capture is not touched."""
        completion = await self._find(state, response_id)
        await self._store.forget_response(state.record.id, completion.number)

    async def _find(self, state: SessionState, response_id: str, code: str = "not_found", param: str = "response_id") -> Completion:
        number = pointers.find(state.record.secret, response_id)
        completion = None if number is None else await self._store.completion(state.record.id, number)
        if completion is None or not completion.stored or completion.status != "complete":
            raise NotFound(
                f"Previous response with id '{response_id}' not found."
                if param == "previous_response_id"
                else f"Response with id '{response_id}' not found.",
                code=code,
                param=param,
            )
        return completion


def _filled(message: Message, answer: Message, named: Sequence[str]) -> Message:
    """What a turn says itself, and those parts of `answer` that it only names, in the answer's order."""
    said = {_bare(call): call for call in message.tool_calls}
    bare = {_bare(call): call for call in answer.tool_calls}
    calls = [said.pop(key, call) for key, call in bare.items() if key in said or any(ref.endswith(key) for ref in named)]
    return replace(
        message,
        content=message.content or (answer.content if any(ref.startswith("msg_") for ref in named) else ""),
        thinking=message.thinking or (answer.thinking if any(ref.startswith("rs_") for ref in named) else ()),
        tool_calls=(*calls, *said.values()),
    )


def _bare(call: ToolCall) -> str:
    """A completion's reference and the call's index."""
    return call.id[-(pointers.LENGTH + 2) :]


def as_echoed(answer: Message) -> Message:
    """A recorded answer as its harness would send it back: its calls have the ids that were given out."""
    return replace(answer, tool_calls=tuple(replace(call, id=f"call_{call.id}") for call in answer.tool_calls))


def request_of(completion: Completion) -> ChatRequest:
    """The canonical request of a recorded completion, as far as an encoder looks at it."""
    asked = completion.asked
    sampling = dict(asked.get("sampling", {}))
    sampling["stop"] = tuple(sampling.get("stop", ()))
    return ChatRequest(
        model=completion.model_requested,
        messages=completion.messages,
        tools=completion.tools,
        sampling=Sampling(**sampling),
        thinking=asked.get("thinking"),
        effort=asked.get("effort"),
        parallel_tool_calls=asked.get("parallel_tool_calls"),
        response_format=asked.get("response_format"),
        store=completion.stored,
        options=completion.options,
    )


def answer_of(completion: Completion) -> Answer:
    """The answer of a recorded completion, ready for an encoder."""
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in completion.answer.tool_calls)
    return Answer(
        message=replace(completion.answer, tool_calls=calls),
        finish=completion.finish,  # type: ignore[arg-type]
        usage=usage_of(completion),
        stop_sequence=completion.stop_sequence,
    )


def usage_of(completion: Completion) -> Usage:
    return Usage(
        prompt=0 if completion.prompt_ids is None else len(completion.prompt_ids),
        completion=0 if completion.sampled_ids is None else len(completion.sampled_ids),
        cached=completion.cached_tokens,
        thinking=completion.thinking_tokens,
    )
