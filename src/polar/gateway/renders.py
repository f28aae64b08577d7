"""Long renders in a process of their own, so that they take nothing from the event loop: in a thread they would share its interpreter
lock, which a tokenizer's results hold for milliseconds at a time. Knows no session and no engine.

The process is started once, has its own tokenizer, and dies with its parent, however that dies.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from polar.chat import ChatRequest
from polar.errors import ContextOverflow
from polar.records import Completion, Mode
from polar.tokens.path import TokenPath
from polar.tokens.plan import Keys, Match, Plan
from polar.tokens.tokenizer import load_tokenizer

log = logging.getLogger("polar.gateway")

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class PathSpec:
    """What the process needs to make the same `TokenPath` again: the tokenizer's place and the path's settings."""

    tokenizer: str
    settings: tuple[tuple[str, Any], ...]

    def build(self) -> TokenPath:
        return TokenPath(load_tokenizer(self.tokenizer), **dict(self.settings))


class RenderProcess:
    """One process. `assemble` is `TokenPath.assemble` there; `None` once the process is gone: the caller renders itself."""

    def __init__(self, spec: PathSpec) -> None:
        self.spec = spec
        context = multiprocessing.get_context("spawn")
        self._pool: ProcessPoolExecutor | None = ProcessPoolExecutor(1, context, initializer=_start, initargs=(spec, os.getpid()))
        self._pool.submit(_ready)  # starts it now: a first call need not wait for it

    async def assemble(self, request: ChatRequest, keys: Keys, match: Match, parent: Completion | None, mode: Mode) -> Plan | None:
        """Raises `ContextOverflow` as the path does."""
        if self._pool is None:
            return None
        try:
            made = await asyncio.get_running_loop().run_in_executor(self._pool, _assemble, request, keys, match, parent, mode)
        except BrokenProcessPool:
            log.warning("the render process has died; long prompts are rendered in a thread")
            self.close()
            return None
        if isinstance(made, Plan):
            return made
        message, prompt_tokens, limit = made
        raise ContextOverflow(message, prompt_tokens=prompt_tokens, limit=limit)

    @property
    def alive(self) -> bool:
        """Whether it takes renders, as far as is known: a process that died is noticed at the next one."""
        return self._pool is not None

    def close(self, *, at_once: bool = True) -> None:
        """Ends the process, after the renders that it was given unless `at_once`."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=at_once)
            self._pool = None


def _ready() -> None:
    """The first job: done when the tokenizer has been loaded."""


_path: TokenPath | None = None
"""In the render process only."""


def _start(spec: PathSpec, parent: int) -> None:
    global _path
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
    _path = spec.build()


def _assemble(
    request: ChatRequest, keys: Keys, match: Match, parent: Completion | None, mode: Mode
) -> Plan | tuple[str, int | None, int | None]:
    assert _path is not None
    try:
        return _path.assemble(request, keys, match, parent, mode=mode)
    except ContextOverflow as error:
        return error.message, error.prompt_tokens, error.limit
