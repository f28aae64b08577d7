"""Fakes of the real edges (tokenizer, engine, sandbox, clock), shipped so that users can test without a network or a GPU."""

from polar.engine.api import Drop
from polar.testing.engine import Call, Reply, Script, ScriptedEngine, ScriptedServer, fake_logprob, serve_scripted
from polar.testing.serve import Running, serve_app

__all__ = ["Call", "Drop", "Reply", "Running", "Script", "ScriptedEngine", "ScriptedServer", "fake_logprob", "serve_app", "serve_scripted"]
