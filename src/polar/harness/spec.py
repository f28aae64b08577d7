"""Which agent works on a task: the `agent` object, JSON-compatible with the reference system's `AgentSpec`. Knows no preset."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class McpServer(BaseModel):
    """A Model Context Protocol server that the agent may use; each preset writes it in its CLI's own form."""

    model_config = ConfigDict(extra="forbid")

    name: str
    transport: Literal["stdio", "sse", "streamable-http"] = "stdio"
    command: str | None = None
    args: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    url: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _complete(self) -> McpServer:
        if self.transport == "stdio" and not self.command:
            raise ValueError(f"the MCP server {self.name!r} speaks stdio: it needs a command")
        if self.transport != "stdio" and not self.url:
            raise ValueError(f"the MCP server {self.name!r} speaks {self.transport}: it needs a url")
        return self


class AgentSpec(BaseModel):
    """The agent of a task."""

    model_config = ConfigDict(extra="forbid")

    harness: str | None = None
    """A preset's name (`polar harness list`)."""
    import_path: str | None = None
    """`module:Class` of a `polar.harness.Harness` that is not registered; instead of `harness`."""
    model_name: str | None = None
    """What the harness calls the model; `None`: the served model's own name. Any name reaches the served model."""
    dialect: Literal["anthropic", "openai_chat", "openai_responses", "google"] | None = None
    """Which protocol the harness speaks; `None`: the one it is best tested in."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Merged into the CLI's own configuration file; `context`, `max_output`, `compact_at`, `retries` and `extra_args` are Polar's own
    (`polar.harness.Options`)."""
    env: dict[str, str] = Field(default_factory=dict)
    mcp_servers: list[McpServer] = Field(default_factory=list)
    skills_path: str | None = None
    """A folder on the node with one folder a skill (`SKILL.md` inside), relative to the task's."""
    custom_shell: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    """The command of the harness `shell`, or several that run one after another; `{{INSTRUCTION}}` and its kin are replaced, quoted. An
    object has `command`, `cwd`, `env` and `timeout_sec` (the reference's `ExecInput`)."""
    install: Literal["mount", "copy", "present"] = "mount"
    """How the CLI gets into the sandbox: mounted read-only from the node, copied in, or already part of the image (found on its PATH)."""

    @model_validator(mode="after")
    def _one(self) -> AgentSpec:
        if self.harness is None and self.import_path is None and self.custom_shell is not None:
            self.harness = "shell"
        if (self.harness is None) == (self.import_path is None):
            raise ValueError("an agent needs either a harness or an import_path")
        return self
