"""What the documentation says exists, exists: links, commands, options, routes, settings, and the parts made from the code are fresh."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import pkgutil
import re
import types
from pathlib import Path
from typing import Any, get_args

import aiohttp
import pytest
import yaml
from typer.main import get_command

import polar
from polar.cli.commands import app
from polar.evaluator import from_spec
from polar.evaluator import registered as evaluators
from polar.evaluator.detector import Kind
from polar.gateway.admin import admin_app
from polar.gateway.config import GatewayConfig
from polar.gateway.metrics import Metrics
from polar.harness import Endpoint, named, registered
from polar.harness.agent import AgentRun
from polar.harness.spec import AgentSpec
from polar.records import Cause
from polar.rollout import settings
from polar.rollout.checks import check_task
from polar.rollout.models import EvaluatorSpec, TaskRequest
from polar.runtime import RuntimeSpec, backend_of
from polar.runtime import registered as runtimes
from polar.tasks import SETS, harbor, to_request
from polar.tasks.lines import Line
from polar.testing import serve_scripted
from polar.testing.rollout import TOKEN, stub_rollouts
from polar.train.config import TrainConfig
from polar.train.sft_config import SftConfig

ROOT = Path(__file__).parents[2]
TINY = Path(polar.__file__).parent / "assets" / "tiny-qwen3"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HAND_WRITTEN = [page for page in PAGES if page.name != "reference.md"]
IDS = [page.name for page in PAGES]


def load_script() -> types.ModuleType:
    path = ROOT / "scripts" / "make_reference.py"
    spec = importlib.util.spec_from_file_location("make_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def headings(page: Path) -> set[str]:
    anchor = load_script().anchor
    return {
        anchor(line.lstrip("#").strip().replace("`", "")) for line in without_code(page.read_text()).splitlines() if line.startswith("#")
    }


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        there = page if not name else (page.parent / name).resolve()
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in headings(there), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_and_their_options_exist(page: Path) -> None:
    root = get_command(app)
    code = "\n".join(
        re.findall(r"`(polar [^`\n]*)`", page.read_text()) + re.findall(r"^(?:\$ )?(polar .*)$", page.read_text(), re.MULTILINE)
    )
    for line in code.splitlines():
        words = line.split("#")[0].replace("\\", "").split()[1:]
        command = root
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        assert not getattr(command, "commands", None) or not words or words[0].startswith("-"), f"{page.name}: {line}"
        known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
        used = {word.partition("=")[0] for word in words if re.fullmatch(r"--[a-z-]+(=.*)?|-[a-z]", word)}
        assert used <= known, f"{page.name}: {line}"


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=[page.name for page in HAND_WRITTEN])
def test_settings_in_yaml_are_valid(page: Path) -> None:
    """Each block is what its keys say: a task, an evaluator, a sandbox, `polar.yaml`, `sft.yaml`, `train.yaml`, a gateway's settings."""
    for block in blocks(page, "yaml"):
        checked(yaml.safe_load(block))


def checked(found: dict[str, Any]) -> None:
    if "task_id" in found:
        check_task(TaskRequest.model_validate(found))
    elif "strategy" in found:
        from_spec(EvaluatorSpec.model_validate(found))
    elif "backend" in found:
        spec = RuntimeSpec.model_validate(found)
        backend_of(spec).check(spec)
    elif {"model", "data"} <= found.keys():
        SftConfig.model_validate({"output": "out", **found})
    elif "model" in found and found.keys() & {"tasks", "recorded"}:
        TrainConfig.model_validate(found)
    elif found.keys() & {"rollout", "gateway"}:
        settings.parse(found)
    else:
        GatewayConfig.model_validate(found)


def test_agents_and_tasks_in_json_are_valid() -> None:
    (agent,) = blocks(ROOT / "docs" / "harnesses.md", "json")
    AgentRun(AgentSpec.model_validate_json(agent), task_folder=None)
    (lines,) = blocks(ROOT / "docs" / "tasks.md", "json")
    for number, line in enumerate(lines.splitlines()):
        to_request(Line.read(json.loads(line), f"line {number}", "task"), agent=AgentSpec(custom_shell="true"))


def test_the_task_that_is_written_step_by_step_is_a_good_one(tmp_path: Path) -> None:
    """docs/tasks.md, "Write one": its files, as they stand there."""
    page = (ROOT / "docs" / "tasks.md").read_text()
    written = re.findall(r"^```\w+\n(?:# |<!-- )my-task/(\S+?)(?: -->)?\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert {name for name, _ in written} == {"task.toml", "instruction.md", "tests/test.sh", "solution/solve.sh"}
    folder = tmp_path / "my-task"
    for name, text in [*written, ("environment/files/numbers.txt", "3\n4\n5\n")]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    task = harbor.load(folder)
    for work in (tmp_path / "solved", tmp_path / "not"):
        harbor.prepare(task, work)
    harbor.solve(task, tmp_path / "solved")
    assert (harbor.grade(task, tmp_path / "solved").reward, harbor.grade(task, tmp_path / "not").reward) == (1.0, 0.0)


def first_cells(page: Path, heading: str) -> set[str]:
    """The names in the first column of the tables below a heading."""
    text = page.read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return {name for line in text.splitlines() if line.startswith("| `") for name in re.findall(r"`([\w.]+)`", line.split("|")[1])}


def test_what_isolates_is_what_is_tested() -> None:
    """Each row of the table in docs/runtimes.md is a test, and each test has its row."""
    tests = set(re.findall(r"^async def (test_\w+)", (ROOT / "tests" / "runtime" / "test_escape.py").read_text(), re.MULTILINE))
    assert set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "runtimes.md").read_text())) == tests


def test_every_backend_and_every_evaluator_is_explained() -> None:
    page = ROOT / "docs" / "runtimes.md"
    known = {name for name, backend in runtimes().items() if backend.__module__.startswith("polar.runtime.")}
    assert {name for name in known if f"| `{name}` |" in page.read_text()} == known
    text = (ROOT / "docs" / "evaluators.md").read_text()
    ours = {name for name, judge in evaluators().items() if judge.__module__.startswith("polar.evaluator.")}
    assert {name for name in ours if f"`{name}`" in text} == ours


def test_events_and_error_codes_are_those_of_the_code() -> None:
    page = ROOT / "docs" / "rollout.md"
    source = "\n".join(path.read_text() for path in sorted((ROOT / "src" / "polar" / "rollout").rglob("*.py")))
    emitted = set(re.findall(r'emit\(\s*"([a-z_.]+)"', source))
    assert first_cells(page, "Events") == emitted
    told = first_cells(page, "How a session ends") - {"graded", "policy", "infrastructure", "cancelled"} | {"cancelled"}
    assert {code for code in told if f'"{code}"' not in source} == set()


def test_kinds_of_the_detector_are_explained() -> None:
    assert first_cells(ROOT / "docs" / "evaluators.md", "The detector") == set(get_args(Kind))


def test_bundled_sets_are_counted() -> None:
    text = (ROOT / "docs" / "tasks.md").read_text()
    told = {name: int(count) for name, count in re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.MULTILINE)}
    assert told == {name: len(one.tasks()) for name, one in SETS.items() if name != "all"}


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=[page.name for page in HAND_WRITTEN])
def test_files_and_modules_that_are_named_exist(page: Path) -> None:
    text = without_code(page.read_text())
    for path in re.findall(r"`((?:tests|src|scripts|bench|docs)/[\w./-]+)`", text):
        if "NAME" not in path and path != "tests/test.sh":  # a task's
            assert (ROOT / path).exists(), f"{page.name} names {path}"
    numbers = (ROOT / "src" / "polar" / "train" / "figures.py").read_text()  # metrics of the trainer are called alike
    for path in re.findall(r"`((?:rollout|runtime|evaluator|harness|trajectory|gateway|tokens)/[\w./]+)`", text):
        if page.name == "training.md" and path.removesuffix("...") in numbers:
            continue
        assert (ROOT / "src" / "polar" / path).exists() or (ROOT / path).exists(), f"{page.name} names {path}"
    for name in re.findall(r"`(polar\.[\w.]+)`", text):
        if name not in ("polar.yaml", "polar.db", "polar.builders"):  # files, and a group of entry points
            pkgutil.resolve_name(name)


def test_the_readme_makes_what_the_makefile_has() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z-]+)", (ROOT / "README.md").read_text())) <= targets


def test_the_table_of_routes_is_complete() -> None:
    page = (ROOT / "docs" / "gateway.md").read_text()
    told = {(method, path) for method, path in re.findall(r"^\| `(GET|POST|DELETE) (/[^`?]*)`", page, re.MULTILINE)}
    served = {
        (method, route.path)  # type: ignore[attr-defined]
        for route in admin_app(None).routes  # type: ignore[arg-type]
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    assert told == served


def test_every_cause_of_a_break_is_explained() -> None:
    page = (ROOT / "docs" / "gateway.md").read_text()
    rows = {name for line in page.splitlines() if line.startswith("| `") for name in re.findall(r"`([a-z_]+)`", line.split("|")[1])}
    assert {str(cause) for cause in Cause} <= rows


def test_metrics_that_are_named_exist() -> None:
    made = {
        f"{metric._name}_total" if metric._type == "counter" else metric._name
        for metric in vars(Metrics()).values()
        if hasattr(metric, "_documentation")
    }
    made |= set(re.findall(r"`(polar_\w+)`", load_script().service_metrics_table()))
    for page in HAND_WRITTEN:
        assert set(re.findall(r"`(polar_\w+)`", page.read_text())) - {"polar_yaml"} <= made, page.name


def test_the_table_of_harnesses_is_true() -> None:
    page = (ROOT / "docs" / "harnesses.md").read_text()
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| `")]
    told = {row[0]: row for row in rows if len(row) == 6}
    assert set(told) == set(registered())
    for name, harness in registered().items():
        needs = "" if harness.needs_node is None else f"Node.js {'.'.join(str(part) for part in harness.needs_node).removesuffix('.0')}"
        dialects = "all four" if name == "shell" else ", ".join(harness.dialects)
        assert told[name][1:] == [
            harness.title if name != "shell" else "any command",
            harness.version,
            dialects,
            harness.package or "",
            needs,
        ]


def test_the_python_of_the_harness_page_runs() -> None:
    spaces: list[dict[str, object]] = []
    for block in blocks(ROOT / "docs" / "harnesses.md", "python"):
        spaces.append({"__name__": "page"})
        exec(compile(block, "harnesses.md", "exec"), spaces[-1])
    shell = named("shell")
    endpoint = Endpoint("http://127.0.0.1:1/s/KEY", "KEY", "openai_chat", "polar")
    command = shell.command((), "Say 'hi'.", endpoint, spaces[1]["mini"])  # type: ignore[arg-type]
    assert "-m openai/polar" in command.argv[-1]
    assert "{{" not in command.argv[-1]


async def test_the_python_of_the_gateway_page_runs(tmp_path: Path) -> None:
    (block,) = blocks(ROOT / "docs" / "gateway.md", "python")
    page: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, "gateway.md", "exec"), page)

    async def play(base_url: str, key: str) -> None:
        body = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
        async with aiohttp.ClientSession() as client, client.post(base_url + "/v1/chat/completions", json=body) as answer:
            assert answer.status == 200

    store = str(tmp_path / "polar.db")
    with serve_scripted(lambda call: "Hello.", tokenizer_dir=TINY) as server:
        session_id = await page["rollout"](server.url, store, play, tokenizer=str(TINY), renderer="qwen3")
    ((prompt_ids, sampled_ids, logprobs),) = await page["trainable"](store, session_id)
    assert len(prompt_ids)
    assert len(sampled_ids) == len(logprobs)


async def test_the_python_of_the_rollout_page_runs(tmp_path: Path) -> None:
    pages: list[dict[str, Any]] = []
    for block in blocks(ROOT / "docs" / "rollout.md", "python"):
        pages.append({"__name__": "page"})
        exec(compile(block, "rollout.md", "exec"), pages[-1])
    async with stub_rollouts(tmp_path) as (_, url):
        task = {"task_id": "storm", "instruction": "x", "num_samples": 3, "agent": {"harness": "pi"}}
        rewards = await asyncio.to_thread(pages[0]["rewards"], task, url=url, token=TOKEN)
        assert len(rewards) == 3
        assert None not in rewards
        groups = await pages[1]["groups"](url, TOKEN)
        assert {name: len(found) for name, found in groups.items()} == {"one": 2, "two": 2}


def test_what_is_made_from_the_code_is_fresh(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script()
    monkeypatch.setattr("sys.argv", ["make_reference.py", "--check"])
    assert script.main() == 0, capsys.readouterr().out
