"""Runs families of requests through a whole gateway and judges every answer.

A family is one conversation in one session: a request that the provider would take, its mutations, the next turn with the real answer
in its history, and mutations of that. Mutations are harmless (another spelling, more than is known) and must give the very prompt of the
original, or damaging and must give an answer or an error in the provider's shape. Whatever comes, nothing of another family may show.
"""

from __future__ import annotations

import asyncio
import gzip
import random
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
import zstandard
from fuzz_json import Json, add_unknown, broken_bytes, damage, dumps, holder, paths, reorder, write
from fuzz_talk import CANARY, Sampler, Talk, prompt_digest, talk
from fuzz_wire import Shot, Wire

from polar.records import Completion, Session
from polar.testing.asgi import Answer, AsgiClient
from polar.testing.gateway import ScriptedGateway, scripted_gateway
from polar.tokens import pointers

FAILURES_SHOWN = 3
TIMEOUT_S = 30.0
"""No request may take longer, on a machine that does other things besides."""
_REFERENCES = (
    "id",
    "tool_use_id",
    "tool_call_id",
    "call_id",
    "signature",
    "data",
    "encrypted_content",
    "thoughtSignature",
    "previous_response_id",
)


@dataclass
class Tally:
    harmless: int = 0
    damaging: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    bridged: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    @property
    def mutations(self) -> int:
        return self.harmless + self.damaging

    def __str__(self) -> str:
        statuses = ", ".join(f"{count} x {status}" for status, count in sorted(self.statuses.items()))
        return (
            f"{self.mutations} mutations ({self.harmless} harmless), {self.bridged} bridged, breaks {dict(self.broken)}, "
            f"statuses {statuses}, slowest {self.slowest_s * 1000:.0f} ms"
        )


@dataclass
class Outcome:
    answer: Answer
    whole: Json = None
    completion: Completion | None = None


@dataclass
class Field:
    """A gateway with what all families on it share. `foreign` are references that other sessions were given."""

    gateway: ScriptedGateway
    sampler: Sampler
    foreign: list[str] = field(default_factory=list)


@asynccontextmanager
async def fuzz_field(folder: Path, tokenizer_dir: Path) -> AsyncIterator[Field]:
    sampler = Sampler()
    async with scripted_gateway(sampler, folder, tokenizer_dir=tokenizer_dir, check=False, grace_s=0.05, cache_mb=64) as gateway:
        yield Field(gateway, sampler)


class Family:
    def __init__(self, world: Field, wire: Wire, rng: random.Random, tally: Tally) -> None:
        self.world = world
        self.wire = wire
        self.rng = rng
        self.tally = tally
        self.talk: Talk = talk(rng)
        self.key = ""
        self.session: Session

    async def run(self, mutations: int) -> None:
        """The conversation, with `mutations` of its first request and as many of its second, half of each harmless."""
        rng = self.rng
        settings = {"stream": "live"} if rng.random() < 0.3 else {}
        kind = rng.choice(["train", "eval"])
        self.session, self.key = await self.world.gateway.gateway.sessions.create(kind=kind, settings=settings)
        first = self.wire.shot(self.talk, rng)
        began = await self._valid(first)
        assert began.completion is not None
        if rng.random() < 0.1 and began.completion.mode == "tokens":
            await self._count(first, began.completion)
        await self._mutate(first, began, mutations)
        second = self.wire.grow(first, began.whole, self.talk, rng)
        went_on = await self._valid(second)
        self._note_bridge(began.completion, went_on.completion)
        await self._mutate(second, went_on, mutations, grown="previous_response_id" not in (second.body or {}))
        await self._look_up(self.wire.number_text(began.whole))
        self._leave_references(went_on.whole)

    # --- kinds of requests ----------------------------------------------------------------------------------------------

    async def _mutate(self, shot: Shot, original: Outcome, count: int, *, grown: bool = False) -> None:
        for _ in range(count - count // 2):
            mutant = shot.copy()
            self._harmless(mutant, grown=grown)
            outcome = await self._valid(mutant)
            self._same_prompt(original, outcome, shot, mutant)
            self.tally.harmless += 1
        # last, since an altered history of this session is one that later requests may be matched to
        for _ in range(count // 2):
            mutant = shot.copy()
            try:
                self._damaging(mutant)
                await self._survive(mutant)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{described(mutant)}") from error
            self.tally.damaging += 1

    def _harmless(self, shot: Shot, *, grown: bool) -> None:
        rng = self.rng
        for _ in range(rng.choice([1, 1, 2, 3])):
            kind = rng.randrange(8 if grown else 6)
            if kind < 2:
                add_unknown(shot.body, rng)
            elif kind == 2:
                reorder(shot.body, rng)
            elif kind < 6:
                self.wire.respell(shot, rng)
            else:
                self.wire.noise(shot, rng)
        shot.raw = write(shot.body, rng) if rng.random() < 0.5 else orjson.dumps(shot.body)
        match rng.randrange(8):
            case 0:
                shot.raw = gzip.compress(shot.raw, 1)
                shot.headers["content-encoding"] = rng.choice(["gzip", "GZIP", "x-gzip"])
            case 1:
                shot.raw = zstandard.compress(shot.raw)
                shot.headers["content-encoding"] = "zstd"
            case 2:
                shot.raw = zlib.compress(shot.raw)
                shot.headers["content-encoding"] = "deflate"
            case 3:
                shot.headers |= {"x-new-header": "größe".encode().decode("latin-1"), "accept": "*/*", "content-type": "text/plain"}
            case 4:
                shot.url = f"/s/{self.key}{shot.url}"
                shot.headers |= rng.choice([{}, {"x-api-key": "dummy", "authorization": "Bearer dummy"}])
            case 5:
                shot.url += ("&" if "?" in shot.url else "?") + "unknown=1"

    def _damaging(self, shot: Shot) -> None:
        rng = self.rng
        kind = rng.randrange(20)
        if kind < 13:
            for _ in range(rng.choice([1, 1, 1, 2, 5])):
                shot.body = damage(shot.body, rng)
            shot.raw = dumps(shot.body)
        elif kind == 13:
            shot.raw = broken_bytes(dumps(shot.body), rng)
        elif kind == 14:
            shot.raw = dumps(shot.body)
            shot.headers["content-encoding"] = rng.choice(["gzip", "zstd", "br", "deflate", "gzip, gzip", "utf-8", "\xff"])
            shot.raw = rng.choice([shot.raw, gzip.compress(shot.raw)[:-5], zstandard.compress(shot.raw)[:-3], b"\x1f\x8b", b"(\xb5/\xfd"])
        elif kind == 15:
            shot.method = rng.choice(["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW", "POST"])
            shot.url = rng.choice([shot.url, *self.wire.wrong_paths()])
            shot.raw = dumps(shot.body)
        elif kind == 16:
            shot.headers["upgrade"] = rng.choice(["websocket", "h2c"])
            shot.raw = dumps(shot.body)
        else:
            self._foreign(shot)
            shot.raw = dumps(shot.body)

    def _foreign(self, shot: Shot) -> None:
        """Ids and signatures of other sessions, or broken ones, in place of this conversation's."""
        rng = self.rng
        pool = [*self.world.foreign[-200:], "msg_" + "0" * 26, "resp_" + "f" * 26, "enc_", "", "AAAA"]
        places = [path for path in paths(shot.body) if path[-1] in _REFERENCES]
        for path in places if rng.random() < 0.5 else places[:1]:
            holder(shot.body, path)[path[-1]] = rng.choice(pool)
        if not places or rng.random() < 0.2:
            shot.body["previous_response_id"] = rng.choice(pool)

    async def _count(self, shot: Shot, completion: Completion) -> None:
        counting = self.wire.count(shot)
        if counting is None or completion.prompt_ids is None:
            return
        asked, number = counting
        answer = await self._send(asked)
        assert answer.status == 200, answer.body
        assert number(answer.json()) == len(completion.prompt_ids)

    async def _look_up(self, own: str) -> None:
        """Answers are found again by their own session only."""
        for method, url in self.wire.lookups(self.rng.choice([*self.world.foreign[-50:], "resp_x"])):
            answer = await self._send(Shot(url, None, method))
            assert answer.status == 404, (url, answer.status)
            self.wire.check_error(answer.status, answer.json())
        for method, url in self.wire.lookups(own):
            assert (await self._send(Shot(url, None, method))).status in (200, 404)

    def _leave_references(self, whole: Json) -> None:
        """For other families to try."""
        found = [holder(whole, path)[path[-1]] for path in paths(whole) if path[-1] in (*_REFERENCES, "responseId")]
        self.world.foreign += [text for text in found if isinstance(text, str)]
        del self.world.foreign[:-400]

    # --- judging --------------------------------------------------------------------------------------------------------

    async def _send(self, shot: Shot) -> Answer:
        client = AsgiClient(self.world.gateway.gateway.api, self.wire.headers(self.key))
        body = shot.raw if shot.raw is not None else shot.body
        began = time.perf_counter()
        try:
            answer = await asyncio.wait_for(client.request(shot.method, shot.url, body, shot.headers), TIMEOUT_S)
        except TimeoutError:
            raise AssertionError("no answer in time") from None
        self.tally.slowest_s = max(self.tally.slowest_s, time.perf_counter() - began)
        self.tally.statuses[answer.status] += 1
        if len(self.world.gateway.engine.calls) > 500:
            self.world.gateway.engine.calls.clear()
        strangers = set(CANARY.findall(answer.body.decode(errors="replace"))) - {self.talk.canary}
        assert not strangers, f"an answer shows another session's text: {strangers}"
        return answer

    async def _valid(self, shot: Shot) -> Outcome:
        answer = await self._send(shot)
        assert answer.status == 200, f"{answer.status} {answer.body!r} for\n{described(shot)}"
        try:
            return await self._read(answer)
        except (AssertionError, KeyError, IndexError, TypeError, ValueError) as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n{answer.body.decode()[-3000:]}\n{described(shot)}") from error

    async def _survive(self, shot: Shot) -> None:
        answer = await self._send(shot)
        assert 200 <= answer.status < 500, f"{answer.status} {answer.body[:300]!r}"
        if answer.status >= 400:
            if shot.method != "HEAD":
                self.wire.check_error(answer.status, answer.json())
        elif shot.method == "POST" and b"count" not in shot.url.encode():
            await self._read(answer)

    async def _read(self, answer: Answer) -> Outcome:
        """A generation's answer with what was recorded of it; the record must keep the laws."""
        whole = self.wire.whole(answer)
        number = pointers.find(self.session.secret, self.wire.number_text(whole))
        assert number is not None, "the answer does not name its completion"
        store = self.world.gateway.gateway.store
        completion = await store.completion(self.session.id, number)
        assert completion is not None, "an answered completion was not recorded"
        assert completion.prompt_ids is not None
        assert completion.sampled_ids is not None
        self._own_text(completion)
        positions = np.arange(len(completion.sampled_ids), dtype=np.int64)
        expected = -((completion.sampled_ids.astype(np.int64) * 2654435761 + positions * 40503) % 4096) / 1024.0
        assert np.array_equal(completion.logprobs, expected.astype(np.float32))
        if completion.parent is not None:
            parent = await store.completion(self.session.id, completion.parent)
            assert parent is not None
            assert parent.ids is not None
            extends = np.array_equal(completion.prompt_ids[: len(parent.ids)], parent.ids)
            assert extends == (completion.broken is None), f"extends {extends}, recorded {completion.broken}"
        return Outcome(answer, whole, completion)

    def _own_text(self, completion: Completion) -> None:
        digest = prompt_digest(completion.prompt_ids)  # type: ignore[arg-type]
        found = self.world.sampler.canaries.pop(digest, None)
        if found is None:
            found = frozenset(CANARY.findall(self.world.gateway.engine.tokenizer.decode(completion.prompt_ids.tolist())))  # type: ignore[union-attr]
        assert found <= {self.talk.canary}, f"a prompt holds another session's text: {found}"

    def _same_prompt(self, original: Outcome, outcome: Outcome, shot: Shot, mutant: Shot) -> None:
        assert original.completion is not None
        assert outcome.completion is not None
        if np.array_equal(outcome.completion.prompt_ids, original.completion.prompt_ids):
            return
        if "ambiguous_parent" in outcome.completion.tags:
            # without an id or signature it may as well go on from a damaged twin of the turn before, alike but for thinking and
            # the outer whitespace of answers, which fingerprints leave out
            return
        decode = self.world.gateway.engine.tokenizer.decode
        texts = [decode(one.completion.prompt_ids.tolist(), skip_special=False) for one in (original, outcome)]  # type: ignore[union-attr]
        raise AssertionError(f"another prompt\n--- original\n{texts[0]}\n--- mutant\n{texts[1]}\n{described(shot)}\n{described(mutant)}")

    def _note_bridge(self, before: Completion | None, after: Completion | None) -> None:
        assert before is not None
        assert after is not None
        if before.mode == after.mode == "tokens":
            assert after.parent is not None, "the next turn was not recognised"
        if after.broken is None:
            self.tally.bridged += 1
        else:
            self.tally.broken[f"{after.mode}: {after.broken.cause}"] += 1


def described(shot: Shot) -> str:
    raw = shot.raw if shot.raw is not None else orjson.dumps(shot.body)
    return f"{shot.method} {shot.url} {shot.headers} {raw[:6000]!r}"


async def run_families(world: Field, wire: Wire, *, mutations: int, seed: int, each: int = 9, at_once: int = 12) -> Tally:
    """At least `mutations` mutated requests. The same seed makes the same requests, whatever the order in which they are served."""
    tally = Tally()
    numbers = iter(range(-(-mutations // (2 * each))))
    failures: list[str] = []

    async def work() -> None:
        for number in numbers:
            if len(failures) >= FAILURES_SHOWN:
                return
            name = f"{wire.name}/{seed}/{number}"
            try:
                await Family(world, wire, random.Random(name), tally).run(each)
            except AssertionError as error:
                failures.append(f"family {name}: {error}")

    await asyncio.gather(*(work() for _ in range(at_once)))
    if failures:
        raise AssertionError("\n\n".join(failures))
    return tally
