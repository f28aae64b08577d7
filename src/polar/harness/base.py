"""What an agent program is to Polar: how to install it, point it at the gateway, start it, and read its calls' roles.

Knows no gateway, no store and no tokens. A new harness is one file beside this one: subclass `Harness`, decorate it with
`@register`. A harness is never changed: everything here goes through its own configuration files, environment and flags, in a
home folder of its own, so that nothing of the user's is read or written.

Every preset holds to this:

* prompts go in by stdin, where length and quoting do not matter;
* telemetry, update checks, model catalogues and every other side traffic are off;
* `problem` tells the truth about a run, whatever exit code the program chose;
* `tag` is a pure function of one recorded completion, so that tags can be recomputed at any time (design, "Tags").
"""

from __future__ import annotations

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from polar.errors import ConfigError
from polar.harness.home import Home
from polar.harness.mcp import check_servers
from polar.harness.spec import McpServer
from polar.records import Completion

Dialect = Literal["anthropic", "openai_chat", "openai_responses", "google"]
Role = Literal["main", "sub_agent", "compaction", "title", "router", "probe"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the model is. `base_url` ends before the provider's own path (no `/v1`), a session prefix included."""

    base_url: str
    key: str
    dialect: Dialect
    model: str

    @property
    def root(self) -> str:
        return self.base_url.rstrip("/")

    @property
    def v1(self) -> str:
        return self.root + "/v1"

    @property
    def v1beta(self) -> str:
        return self.root + "/v1beta"


@dataclass(frozen=True, slots=True)
class Options:
    """What a run may ask of its harness, in one vocabulary.

    `context` is the model's length in tokens, `max_output` the longest answer; `compact_at` asks the harness to compact its
    conversation beyond that many tokens (`None`: as it decides from `context`). `retries` caps how often a failing call is repeated.
    `settings` are merged into the harness's own configuration file, in its own vocabulary. `mcp_servers` are written in its own form.
    """

    context: int = 131_072
    max_output: int = 8_192
    compact_at: int | None = None
    retries: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()
    mcp_servers: tuple[McpServer, ...] = ()

    @classmethod
    def within(cls, context: int | None, **more: Any) -> Options:
        """Options for a model of this length, with an answer of at most a quarter of it; the defaults where it is not known."""
        if context is None:
            return cls(**more)
        return cls(context=context, max_output=max(1, min(cls().max_output, context // 4)), **more)


DEFAULTS = Options()


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start. `stdin` is text for its standard input; `None` gives it an empty one."""

    argv: tuple[str, ...]
    stdin: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tag:
    """What a call was for, and the name of the rule that says so."""

    role: Role
    rule: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a harness's recipe: calls that `matches` accepts have this role."""

    role: Role
    name: str
    matches: Callable[[Completion], bool]


class Harness(ABC):
    """One agent program at one pinned version. Instances hold no state."""

    name: ClassVar[str]
    """As on the command line."""
    title: ClassVar[str]
    version: ClassVar[str] = ""
    package: ClassVar[str | None] = None
    """In its registry; `None` where there is nothing to install."""
    registry: ClassVar[Literal["npm", "pypi"]] = "npm"
    program_path: ClassVar[str] = ""
    """The program below `node_modules` (npm) or the virtual environment (PyPI); `{platform}` is `linux-x64` and the like."""
    executable: ClassVar[str] = ""
    """What the program is called on the PATH of an image that has it already."""
    needs_node: ClassVar[tuple[int, int] | None] = None
    """The lowest Node.js that the program runs on; `None` for a native one."""
    dialects: ClassVar[tuple[Dialect, ...]]
    """What it can speak, the best tested first."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """Its recipe, first match wins; what no rule matches is `main`."""
    has_sub_agents: ClassVar[bool] = False
    resumable: ClassVar[bool] = True
    mcp_transports: ClassVar[frozenset[str]] = frozenset()
    """The transports of `McpServer` that it can use; empty where it has no MCP."""
    skills_folder: ClassVar[str | None] = None
    """Where below its home it looks for skills (a folder each, with `SKILL.md`); `None` where it has none."""
    transcripts: ClassVar[tuple[str, ...]] = ()
    """Files and folders below its home in which it keeps its conversations."""

    @abstractmethod
    def configure(self, home: Home, endpoint: Endpoint, options: Options) -> dict[str, str]:
        """Writes its configuration into the private `home` and returns the environment that it needs besides HOME and PATH. Pure."""

    @abstractmethod
    def command(self, program: tuple[str, ...], prompt: str, endpoint: Endpoint, options: Options, *, resume: bool = False) -> Command:
        """The process that works on `prompt`; `resume` continues the latest conversation of the same home and folder."""

    @abstractmethod
    def lines(self, endpoint: Endpoint, options: Options = DEFAULTS) -> list[str]:
        """Shell lines for a person: after them, the installed program talks to `endpoint` and knows the model's length."""

    def version_command(self, program: tuple[str, ...]) -> tuple[str, ...]:
        """What prints its version and does nothing else; empty where there is no program to ask."""
        return (*program, "--version") if program else ()

    def explains(self, completion: Completion) -> bool:
        """Whether this call can be one of the program's own, by the headers that it always sends. A call that it denies was made by
        something else that had the session's key; one that it accepts may be forged: headers are no proof."""
        return True

    def answer(self, stdout: str) -> str | None:
        """The final answer in what it printed, where that can be told."""
        return stdout.strip() or None

    def problem(self, exit_code: int, stdout: str, stderr: str) -> str | None:
        """Why the run failed, or `None`. Overridden where an exit code of 0 does not mean success."""
        if exit_code == 0:
            return None
        last = next((line for line in reversed((stderr or stdout).splitlines()) if line.strip()), "")
        return f"exit code {exit_code}: {last.strip()[:300]}" if last else f"exit code {exit_code}"

    def tag(self, completion: Completion) -> Tag:
        """What this call was for."""
        for rule in self.rules:
            if rule.matches(completion):
                return Tag(rule.role, f"{self.name}: {rule.name}")
        return Tag("main", f"{self.name}: no rule matched")

    def check(self, endpoint: Endpoint, options: Options) -> None:
        """Raises `ConfigError` for what it cannot do: a dialect that it does not speak, an MCP server that it cannot use."""
        self.check_dialect(endpoint)
        check_servers(self.name, options.mcp_servers, self.mcp_transports)

    def check_dialect(self, endpoint: Endpoint) -> None:
        if endpoint.dialect not in self.dialects:
            raise ConfigError(f"{self.name} speaks {', '.join(self.dialects)}, not {endpoint.dialect}")


_REGISTRY: dict[str, Harness] = {}
H = TypeVar("H", bound=type[Harness])


def register(cls: H) -> H:
    """Makes a harness known by its name."""
    _REGISTRY[cls.name] = cls()
    return cls


def registered() -> Mapping[str, Harness]:
    """All harnesses by name, in order of registration."""
    return _REGISTRY


def named(name: str) -> Harness:
    """Raises `ConfigError` for an unknown name."""
    try:
        return _REGISTRY[name]
    except KeyError:
        raise ConfigError(f"no harness is called {name!r}; there are: {', '.join(_REGISTRY)}") from None


# --- helpers for presets -------------------------------------------------------------------------------------------


def merge(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `extra` over it, objects merged key by key."""
    merged = dict(base)
    for key, value in extra.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def json_lines(text: str) -> Iterator[dict[str, object]]:
    """The JSON objects among the lines of a program's output; other lines are skipped. A line ends with a line feed and nothing else: a
    string may hold other separators (U+2028) as they are. One line at a time: the whole may be 64 MB of short ones."""
    at = 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        line, at = text[at:end], end + 1
        if line.startswith("{"):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):  # whatever the agent's own commands print may stand there too
                continue
            if isinstance(value, dict):
                yield value


def export(**variables: str) -> list[str]:
    """`export` lines for a POSIX shell."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


# --- helpers for recipes: what a recorded call says of itself ----------------------------------------------------------


def hint(completion: Completion, name: str) -> str:
    """A recorded request header (lower-case name), `path` or `user_agent`; empty where there is none."""
    value = completion.hints.get(name)
    if value is None:
        headers = completion.hints.get("headers")
        value = headers.get(name) if isinstance(headers, dict) else None
    return value if isinstance(value, str) else ""


def system_text(completion: Completion) -> str:
    return "\n".join(message.text for message in completion.messages if message.role == "system")


def last_user_text(completion: Completion) -> str:
    """The text of the last message, if a user's; empty otherwise."""
    last = completion.messages[-1] if completion.messages else None
    return last.text if last is not None and last.role == "user" else ""


def tool_names(completion: Completion) -> frozenset[str]:
    return frozenset(tool.wire_name or tool.name for tool in completion.tools) | frozenset(tool.name for tool in completion.tools)


def asked_max_tokens(completion: Completion) -> int | None:
    """The longest answer that the harness asked for."""
    sampling = completion.asked.get("sampling")
    value = sampling.get("max_tokens") if isinstance(sampling, dict) else None
    return value if isinstance(value, int) else None
