"""mini-SWE-agent: Chat Completions, Messages and Responses through LiteLLM, Python.

Measured on 2.4.6. Its one tool is `bash`; a run ends when the model runs `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`, and anything else
(three answers without a command, a limit) ends it with the exit code 0 as well: how it ended is read from what its run returns. It does
not stream, and it leaves an answer without a command out of its history. It knows nothing of the model's length and never compacts.

Its command takes the instruction as an argument, which has a limit of 128 KiB on Linux and shows in process lists. So the program is
called from a few lines of Python that read the instruction from standard input; nothing of it is changed. A virtual environment is not
self-contained: a Python outside `/usr` is taken into the sandbox with it (found by variables that its commands do not see); with
one below `/usr`, the image must have the same, or mini-swe-agent itself (`install: present`).
"""

from __future__ import annotations

from typing import Any

from polar.harness.base import (
    DEFAULTS,
    Command,
    Dialect,
    Endpoint,
    Harness,
    Options,
    export,
    hint,
    json_lines,
    merge,
    register,
    tool_names,
)
from polar.harness.home import Home
from polar.records import Completion

_MODELS: dict[Dialect, str] = {"openai_chat": "openai/", "anthropic": "anthropic/", "openai_responses": "openai/"}
_CONFIG = ".config/mini-swe-agent/polar.yaml"
"""JSON is YAML. Both configurations are named by whole paths: it would look for them in the work folder first."""
_FINISHED = "Submitted"
_RUN = """
import json, os, sys
for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
    os.environ.pop(name, None)
from minisweagent.config import builtin_config_dir
from minisweagent.run.mini import app
config = ["-c", str(builtin_config_dir / "mini.yaml"), "-c", os.environ["POLAR_MINI_CONFIG"]]
sys.argv = ["mini", "-t", sys.stdin.read(), *config, *sys.argv[1:]]
agent = app(standalone_mode=False)
last = agent.messages[-1].get("extra", {})
print("\\n" + json.dumps({"exit_status": last.get("exit_status"), "submission": last.get("submission")}))
"""


@register
class MiniSweAgent(Harness):
    name = "mini-swe-agent"
    title = "mini-SWE-agent"
    version = "2.4.6"
    package = "mini-swe-agent"
    registry = "pypi"
    program_path = "bin/python"
    executable = "python3"
    dialects = ("openai_chat", "anthropic", "openai_responses")
    resumable = False
    transcripts = (".config/mini-swe-agent/last_mini_run.traj.json",)

    def configure(self, home: Home, endpoint: Endpoint, options: Options) -> dict[str, str]:
        self.check(endpoint, options)
        config: dict[str, Any] = {"agent": {"cost_limit": 0}}
        written = home.write_json(_CONFIG, merge(config, options.settings))
        return {
            "POLAR_MINI_CONFIG": str(written),
            "MSWEA_GLOBAL_CONFIG_DIR": str(home.path / ".config/mini-swe-agent"),
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(options.retries + 1),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "PYTHONDONTWRITEBYTECODE": "1",
            **_variables(endpoint),
        }

    def command(self, program: tuple[str, ...], prompt: str, endpoint: Endpoint, options: Options, *, resume: bool = False) -> Command:
        return Command((*program, "-c", _RUN, "--yolo", "--exit-immediately", *_model(endpoint), *options.extra_args), stdin=prompt)

    def lines(self, endpoint: Endpoint, options: Options = DEFAULTS) -> list[str]:
        self.check_dialect(endpoint)
        settings = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        return [*export(**settings, **_variables(endpoint)), f"mini --yolo --exit-immediately {' '.join(_model(endpoint))}"]

    def version_command(self, program: tuple[str, ...]) -> tuple[str, ...]:
        return (*program, "-c", "import minisweagent; print(minisweagent.__version__)")

    def explains(self, completion: Completion) -> bool:
        """LiteLLM calls the OpenAI protocols by OpenAI's own client, whose name others carry, too; its one tool is a further sign."""
        agent = hint(completion, "user-agent").lower()
        return ("openai/python" in agent or agent.startswith("litellm/")) and tool_names(completion) == {"bash"}

    def answer(self, stdout: str) -> str | None:
        text = _ending(stdout).get("submission")
        return text.strip() or None if isinstance(text, str) else None

    def problem(self, exit_code: int, stdout: str, stderr: str) -> str | None:
        status = _ending(stdout).get("exit_status")
        if exit_code == 0 and status != _FINISHED:
            return f"it ended by {status}" if status else "it ended without saying how"
        return super().problem(exit_code, stdout, stderr)


def _model(endpoint: Endpoint) -> tuple[str, ...]:
    more = ("--model-class", "litellm_response") if endpoint.dialect == "openai_responses" else ()
    return ("--model", _MODELS[endpoint.dialect] + endpoint.model, *more)


def _variables(endpoint: Endpoint) -> dict[str, str]:
    if endpoint.dialect == "anthropic":
        return {"ANTHROPIC_API_BASE": endpoint.root, "ANTHROPIC_API_KEY": endpoint.key}
    return {"OPENAI_API_BASE": endpoint.v1, "OPENAI_BASE_URL": endpoint.v1, "OPENAI_API_KEY": endpoint.key}


def _ending(stdout: str) -> dict[str, object]:
    """What `_RUN` prints last."""
    return next((event for event in reversed(list(json_lines(stdout))) if "exit_status" in event), {})
