"""Writes what the documentation takes from the code: `docs/reference.md`, and the tables of other pages (`<!-- made: NAME -->`).

    python scripts/make_reference.py            # write
    python scripts/make_reference.py --check    # exit 1 if something is stale

Modules are read as source (`ast`), so that field docstrings are seen and nothing needs torch. Only the command's options, the metrics and
the routes are asked of the imported code.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference.md"
PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if path != REFERENCE]

MODULES = (
    "polar.chat",
    "polar.errors",
    "polar.records",
    "polar.dialects.base",
    "polar.engines.base",
    "polar.tokens.plan",
    "polar.tokens.path",
    "polar.tokens.history",
    "polar.tokens.fingerprint",
    "polar.tokens.pointers",
    "polar.tokens.rendering",
    "polar.tokens.restore",
    "polar.tokens.reading",
    "polar.tokens.calls",
    "polar.tokens.live",
    "polar.tokens.drift",
    "polar.tokens.tokenizer",
    "polar.store.base",
    "polar.gateway.config",
    "polar.harness.base",
    "polar.harness.spec",
    "polar.harness.agent",
    "polar.runtime.spec",
    "polar.runtime.base",
    "polar.runtime.owner",
    "polar.runtime.prepare",
    "polar.runtime.pool",
    "polar.runtime.reaper",
    "polar.runtime.relay",
    "polar.evaluator.base",
    "polar.evaluator.guards",
    "polar.evaluator.detector",
    "polar.tasks.sets",
    "polar.tasks.request",
    "polar.tasks.validate",
    "polar.rollout.models",
    "polar.rollout.config",
    "polar.rollout.client",
    "polar.rollout.client_async",
    "polar.rollout.stack",
    "polar.rollout.campaign",
    "polar.rollout.node.node",
    "polar.testing",
    "polar.testing.gateway",
    "polar.testing.asgi",
)

HEAD = """# Reference

Made from the docstrings by `scripts/make_reference.py`; don't edit it by hand.
How to use these pieces: [gateway.md](gateway.md), [engines.md](engines.md), [harnesses.md](harnesses.md), [rollout.md](rollout.md),
[runtimes.md](runtimes.md), [evaluators.md](evaluators.md), [tasks.md](tasks.md), [extending.md](extending.md).
"""

Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


# --- modules -----------------------------------------------------------------------------------------------------------


def reference() -> str:
    """The whole of `docs/reference.md`."""
    parts = [HEAD, "- [Commands](#commands)"]
    parts += [f"- [`{name}`](#{anchor(name)})" for name in MODULES]
    text = "\n".join(parts) + "\n\n" + commands()
    return text + "".join(module(name) for name in MODULES)


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def source_of(module_name: str) -> Path:
    path = ROOT / "src" / Path(*module_name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def module(name: str) -> str:
    """A section: the module's docstring, its types, its classes and functions in the order of the source."""
    tree = ast.parse(source_of(name).read_text(encoding="utf-8"))
    lines = [f"\n## `{name}`\n", prose(ast.get_docstring(tree) or "")]
    types = [ast.unparse(node) for node in tree.body if is_type(node)]
    if types:
        lines.append("\n```python\n" + "\n".join(types) + "\n```")
    for node in [*tree.body, *reexported(name, tree)]:
        if isinstance(node, Documented) and not node.name.startswith("_") and ast.get_docstring(node):
            lines.append(documented(node))
    return "\n".join(lines) + "\n"


def is_type(node: ast.stmt) -> bool:
    """A public alias or constant, as far as its value fits on a line."""
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return False
    name = node.targets[0].id
    return name[0].isupper() and name != "T" and len(name) > 1 and len(ast.unparse(node)) <= 140 and "TypeVar" not in ast.unparse(node)


def reexported(name: str, tree: ast.Module) -> Iterator[ast.stmt]:
    """The definitions that a package's `__init__` only passes on."""
    exported: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported = set(ast.literal_eval(node.value))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("polar.") and exported:
            wanted = {alias.name for alias in node.names} & exported
            inner = ast.parse(source_of(node.module).read_text(encoding="utf-8"))
            yield from (item for item in inner.body if isinstance(item, Documented) and item.name in wanted)


def documented(node: Documented) -> str:
    if isinstance(node, ast.ClassDef):
        return class_section(node)
    return f"\n### `{node.name}`\n\n```python\n{signature(node)}\n```\n\n{prose(ast.get_docstring(node) or '')}"


def class_section(node: ast.ClassDef) -> str:
    """Class line, fields and method signatures in a block; then what is said of each."""
    decorators = [f"@{ast.unparse(item)}" for item in node.decorator_list]
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    block = [*decorators, f"class {node.name}({bases}):" if bases else f"class {node.name}:"]
    notes: list[str] = []
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        said = ""
        if isinstance(item, ast.AnnAssign | ast.Assign):
            target = ast.unparse(item.target if isinstance(item, ast.AnnAssign) else item.targets[0])
            if target.startswith("_"):
                continue
            block.append("    " + ast.unparse(item))
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                said = inspect.cleandoc(after.value.value)
        elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and (item.name == "__init__" or not item.name.startswith("_")):
            target = item.name
            block += ["    " + line for line in signature(item).splitlines()]
            said = ast.get_docstring(item) or ""
        else:
            continue
        if said:
            notes.append(f"- `{target}`: {' '.join(said.split())}")
    if block[-1].endswith(":"):
        block[-1] += " ..."
    text = f"\n### `{node.name}`\n\n```python\n" + "\n".join(block) + f"\n```\n\n{prose(ast.get_docstring(node) or '')}"
    return text + ("\n\n" + "\n".join(notes) if notes else "")


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """`def name(...) -> ...`, over several lines where it is long."""
    head = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    decorators = [f"@{ast.unparse(item)}\n" for item in node.decorator_list if ast.unparse(item) != "abstractmethod"]
    line = f"{head} {node.name}({ast.unparse(node.args)}){returns}"
    if len(line) > 118:
        line = f"{head} {node.name}(\n    " + ",\n    ".join(split_arguments(ast.unparse(node.args))) + f",\n){returns}"
    return "".join(decorators) + line


def split_arguments(text: str) -> list[str]:
    """Splits at the commas outside brackets and strings."""
    parts, depth, quote, start = [], 0, "", 0
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and not depth:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()]


def prose(text: str) -> str:
    """A docstring as Markdown; a drawn tree keeps its lines."""
    if "├──" not in text:
        return text
    paragraphs = text.split("\n\n")
    return "\n\n".join(f"```text\n{part}\n```" if "├──" in part else part for part in paragraphs)


# --- commands ----------------------------------------------------------------------------------------------------------


def commands() -> str:
    """Every subcommand with its arguments and options, as `--help` says them."""
    import typer.main

    from polar.cli.commands import app

    lines = ["## Commands\n"]
    for name, command in leaves("polar", typer.main.get_command(app)):
        shown = [param for param in command.params if not getattr(param, "hidden", False) and param.name != "help"]
        arguments = [usage_of(param) for param in shown if param.param_type_name == "argument"]
        lines.append(f"### `{' '.join([name, *arguments])}`\n\n{(command.help or '').strip()}\n")
        options = [param for param in shown if getattr(param, "help", None)]
        if options:
            lines += ["| | default | |", "|---|---|---|"]
            lines += [f"| `{flags(param)}` | {default_of(param)} | {cell(param.help)} |" for param in options]
            lines.append("")
    return "\n".join(lines) + "\n"


def leaves(name, command) -> Iterator[tuple]:  # type: ignore[no-untyped-def, type-arg]
    """(full name, command) of every command that is not a group."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    for word, sub in inner.items():
        yield from leaves(f"{name} {word}", sub)


def usage_of(param) -> str:  # type: ignore[no-untyped-def]
    word = param.name.upper() + ("..." if param.nargs == -1 else "")
    return word if param.required else f"[{word}]"


def flags(param) -> str:  # type: ignore[no-untyped-def]
    if param.param_type_name == "argument":
        return param.name.upper()
    return ", ".join([*param.opts, *param.secondary_opts])


def default_of(param) -> str:  # type: ignore[no-untyped-def]
    value = param.default
    plain = isinstance(value, str | int | float | Path) and str(value) != ""
    if isinstance(value, bool):
        return "on" if value else ""
    return f"`{value}`" if plain else ""


# --- tables of other pages ----------------------------------------------------------------------------------------------

Models = dict[str, str]
"""Class of the module to the title of its table. A class's table has the fields of the bases that stand beside it in the module, too."""


def settings_table() -> str:
    """The YAML settings of a gateway: one table per model."""
    titles = {
        "GatewayConfig": "The file's top level",
        "EngineConfig": "`engines.NAME`: one served model and the servers that serve it",
        "Budgets": "`budgets`: limits per session",
        "TrainSampling": "`train_sampling`: what a `train` session forces",
    }
    return fields_tables("polar.gateway.config", titles)


def rollout_settings_table() -> str:
    """`polar.yaml`."""
    titles = {
        "RolloutConfig": "`rollout`: the service",
        "Retry": "`rollout.callback_retry`: waiting between deliveries",
        "NodesConfig": "`gateway`: what nodes have in common",
        "NodeConfig": "`gateway.nodes[]`: a node",
        "InferenceConfig": "`gateway.nodes[].inference`: its engine, in short",
    }
    return fields_tables("polar.rollout.config", titles)


def training_table() -> str:
    """`train.yaml`."""
    titles = {
        "TrainConfig": "The file's top level",
        "ModelSection": "`model`",
        "LoraSection": "`model.lora`",
        "TasksSection": "`tasks`",
        "EngineSection": "`engine`; what else a gateway takes of an engine ([gateway.md](gateway.md#settings)) stands here, too",
        "RolloutSection": "`rollout`",
        "BatchSection": "`batch`",
        "AdvantageSection": "`advantage`",
        "LossSection": "`loss`",
        "OptimisationSection": "`optimisation`",
        "GateSection": "`gate`",
        "EvaluationSection": "`evaluation`",
        "CheckpointsSection": "`checkpoints`",
        "SyncSection": "`sync`",
        "PriceSection": "`price`",
    }
    return fields_tables("polar.train.config", titles)


def task_table() -> str:
    titles = {
        "TaskRequest": "A task",
        "EvaluatorSpec": "`evaluator`",
        "BuilderSpec": "`builder`",
        "Budget": "`budget`",
        "EarlyStop": "`early_stop`",
    }
    return fields_tables("polar.rollout.models", titles)


def runtime_table() -> str:
    titles = {"RuntimeSpec": "`runtime`", "Step": "`runtime.prepare[]`", "MountSpec": "`runtime.mounts[]`"}
    return fields_tables("polar.runtime.spec", titles)


def evaluator_table(module_name: str, name: str, *parts: str) -> Callable[[], str]:
    """The configuration of one evaluator; `parts` are models that it holds."""
    titles = {name: "`config`", **{part: f"`{part}`" for part in parts}}
    return lambda: fields_tables(module_name, titles)


def swebench_table() -> str:
    """Besides its own it has the fields of `PatchedRepo`, which `test_map`'s table shows."""
    title = (
        "`config`; `base_commit`, `patch_command`, `exclude_patterns`, `protect`, `allow` and `apply_timeout_seconds` are as of `test_map`"
    )
    return fields_tables("polar.evaluator.swebench", {"SwebenchConfig": title})


def fields_tables(module_name: str, titles: Models) -> str:
    """A table for each model: its fields, types, defaults and what is said of them."""
    tree = ast.parse(source_of(module_name).read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    choices = aliases(module_name)
    lines: list[str] = []
    for name, title in titles.items():
        lines += [f"**{title}**", "", "| setting | type | default | |", "|---|---|---|---|"]
        rows: dict[str, str] = {}
        for node in [*(classes[base] for base in map(ast.unparse, classes[name].bases) if base in classes), classes[name]]:
            for item, after in zip(node.body, [*node.body[1:], None], strict=True):
                field = ast.unparse(item.target) if isinstance(item, ast.AnnAssign) else ""
                if not isinstance(item, ast.AnnAssign) or field.startswith("_"):
                    continue
                said = ""
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    said = re.sub(r"^`None`", "Unset", str(after.value.value)).replace("`None`", "unset")
                rows[field] = f"| `{field}` | {cell(type_of(item, choices))} | {field_default(item)} | {cell(said)} |"
        lines += [*rows.values(), ""]
    return "\n".join(lines).rstrip()


_ALIASED = ("polar.evaluator.", "polar.rollout.models", "polar.runtime.spec", "polar.train.")


def aliases(module_name: str) -> dict[str, str]:
    """The aliases of types that a module defines, and that it takes from others of ours: name to that type's text."""
    found: dict[str, str] = {}
    for node in ast.parse(source_of(module_name).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_ALIASED):
            assert node.module is not None
            inner = aliases(node.module)
            found |= {alias.name: inner[alias.name] for alias in node.names if alias.name in inner}
        if not isinstance(node, ast.Assign):
            continue
        value, start = node.value, ast.unparse(node.value).partition("[")[0]
        if start == "Annotated" and isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Tuple):
            value = value.slice.elts[0]
        if start in ("Annotated", "Literal") or (isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr)):
            found[ast.unparse(node.targets[0])] = ast.unparse(value).replace("StrictBool", "bool")
    return found


def type_of(item: ast.AnnAssign, choices: dict[str, str]) -> str:
    text = re.sub(r"Annotated\[(\w+), [^\[\]]*\]", r"\1", ast.unparse(item.annotation))
    text = re.sub(r"\b\w+\b", lambda word: choices.get(word[0], word[0]), text)
    text = re.sub(r"Literal\[([^\]]*)\]", lambda match: match[1].replace("'", "").replace(",", " or"), text)
    return text.removesuffix(" | None").replace(" | ", " or ")


def field_default(item: ast.AnnAssign) -> str:
    value = item.value
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if value.args:
            value = value.args[0]
        elif "default_factory" in given:
            text = ast.unparse(given["default_factory"]).removeprefix("lambda: ")
            known = {"list": "`[]`", "dict": "`{}`", "socket.gethostname": "the machine's name"}
            return known.get(text, "see below" if text[0].isupper() or text.startswith("list(") else f"`{text}`")
        else:
            value = given.get("default")
    if value is None:
        return "required"
    text = ast.unparse(value)
    if text.endswith("()"):
        return "see below"
    return "" if text in ("None", "''") else f"`{text.strip(chr(39)).replace('True', 'true').replace('False', 'false')}`"


def routes_table() -> str:
    """The rollout service's HTTP API, as its own page shows it."""
    from polar.rollout.api import endpoints

    lines = ["| route | |", "|---|---|"]
    for one in endpoints(types.SimpleNamespace(database=None)):  # type: ignore[arg-type]
        query = "".join(f"<br>`?{name}` {why}" for name, why in one.query.items())
        lines.append(f"| `{one.method} {one.path.replace(':path', '')}` | {cell(one.summary + query)} |")
    return "\n".join(lines)


def service_metrics_table() -> str:
    """The rollout service's metrics, as it exposes them."""
    from prometheus_client.parser import text_string_to_metric_families

    from polar.rollout.metrics import exposition

    one = {"any": 1}
    retries = {"by_turns": {"any": {"attempts": 1, "failed": 1}}, "by_code": one}
    counted = ("tasks", "sessions", "sessions_by_status", "outcomes", "deliveries")
    overview = {**dict.fromkeys(counted, one), "retries": retries, "nodes": [{"status": "up"}]}
    lines = ["| metric | label | |", "|---|---|---|"]
    for family in text_string_to_metric_families(exposition(overview, None).decode()):
        labels = ", ".join(f"`{label}`" for label in family.samples[0].labels)
        lines.append(f"| `{family.name}` | {labels} | {family.documentation} |")
    return "\n".join(lines)


def metrics_table() -> str:
    """Name, labels and meaning of every metric, as the gateway exposes them."""
    from polar.gateway.metrics import Metrics

    lines = ["| metric | labels | |", "|---|---|---|"]
    for metric in vars(Metrics()).values():
        if hasattr(metric, "_documentation"):
            suffix = "_total" if metric._type == "counter" else ""
            labels = ", ".join(f"`{label}`" for label in metric._labelnames)
            lines.append(f"| `{metric._name}{suffix}` | {labels} | {metric._documentation} ({metric._type}) |")
    return "\n".join(lines)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "metrics": metrics_table,
    "rollout_settings": rollout_settings_table,
    "training": training_table,
    "task": task_table,
    "runtime": runtime_table,
    "routes": routes_table,
    "service_metrics": service_metrics_table,
    "command": evaluator_table("polar.evaluator.command", "CommandConfig"),
    "harbor": evaluator_table("polar.evaluator.harbor", "HarborConfig", "Artifact"),
    "test_map": evaluator_table("polar.evaluator.test_map", "MappedTestsConfig"),
    "swebench": swebench_table,
    "answer": evaluator_table("polar.evaluator.answer", "AnswerConfig"),
    "judge": evaluator_table("polar.evaluator.judge", "JudgeConfig", "Criterion"),
    "python": evaluator_table("polar.evaluator.python", "PythonConfig"),
    "composition": evaluator_table("polar.evaluator.composition", "CompositionConfig"),
    "part": evaluator_table("polar.rollout.models", "WeightedEvaluator"),
}


def with_tables(page: str) -> str:
    """The page with every `<!-- made: NAME -->` ... `<!-- end -->` filled anew."""

    def filled(match: re.Match[str]) -> str:
        return f"<!-- made: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- made: (\w+) -->\n.*?<!-- end -->", filled, page, flags=re.DOTALL)


def main() -> int:
    wanted = {REFERENCE: reference(), **{page: with_tables(page.read_text(encoding="utf-8")) for page in PAGES}}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale; run: python scripts/make_reference.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
