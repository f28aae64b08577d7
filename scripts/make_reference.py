"""Writes what the documentation takes from the code: `docs/reference.md`, and the tables in `docs/gateway.md`.

    python scripts/make_reference.py            # write
    python scripts/make_reference.py --check    # exit 1 if something is stale

Modules are read as source (`ast`), so that field docstrings are seen and nothing needs torch. Only the command's options and the metrics
are asked of the imported code.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference.md"
GATEWAY = ROOT / "docs" / "gateway.md"

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
    "polar.tokens.live",
    "polar.tokens.drift",
    "polar.tokens.tokenizer",
    "polar.store.base",
    "polar.gateway.config",
    "polar.harness.base",
    "polar.testing",
    "polar.testing.gateway",
    "polar.testing.asgi",
)

HEAD = """# Reference

Made from the docstrings by `scripts/make_reference.py`; don't edit it by hand.
How to use these pieces: [gateway.md](gateway.md), [engines.md](engines.md), [harnesses.md](harnesses.md), [extending.md](extending.md).
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


# --- tables in gateway.md -----------------------------------------------------------------------------------------------


def settings_table() -> str:
    """The YAML settings: one table per model of `polar.gateway.config`."""
    tree = ast.parse(source_of("polar.gateway.config").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    titles = {
        "GatewayConfig": "The file's top level",
        "EngineConfig": "`engines.NAME`: one served model and the servers that serve it",
        "Budgets": "`budgets`: limits per session",
        "TrainSampling": "`train_sampling`: what a `train` session forces",
    }
    lines: list[str] = []
    for name, title in titles.items():
        lines += [f"**{title}**", "", "| setting | type | default | |", "|---|---|---|---|"]
        body = classes[name].body
        for item, after in zip(body, [*body[1:], None], strict=True):
            if not isinstance(item, ast.AnnAssign):
                continue
            said = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                said = str(after.value.value).replace("`None`", "Unset")
            lines.append(f"| `{ast.unparse(item.target)}` | {cell(type_of(item))} | {field_default(item)} | {cell(said)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def type_of(item: ast.AnnAssign) -> str:
    text = ast.unparse(item.annotation)
    choices = re.fullmatch(r"Literal\[(.*)\]", text)
    return choices[1].replace("'", "").replace(",", " or") if choices else text.replace(" | None", "")


def field_default(item: ast.AnnAssign) -> str:
    if item.value is None:
        return "required"
    text = ast.unparse(item.value)
    known = re.search(r"default=([^,)]+)", text)
    if known:
        text = known[1]
    if "default_factory" in text or text.endswith("()"):
        return "see below" if text.endswith("()") else "`{}`"
    return "" if text == "None" else f"`{text.strip(chr(39)).replace('True', 'true').replace('False', 'false')}`"


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


TABLES: dict[str, Callable[[], str]] = {"settings": settings_table, "metrics": metrics_table}


def with_tables(page: str) -> str:
    """The page with every `<!-- made: NAME -->` ... `<!-- end -->` filled anew."""

    def filled(match: re.Match[str]) -> str:
        return f"<!-- made: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- made: (\w+) -->\n.*?<!-- end -->", filled, page, flags=re.DOTALL)


def main() -> int:
    wanted = {REFERENCE: reference(), GATEWAY: with_tables(GATEWAY.read_text(encoding="utf-8"))}
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
