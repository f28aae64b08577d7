"""Polar's own image: Debian with what coding tasks need, made without pulling anything where this machine can.

As root with `debootstrap` installed it is made from Debian's packages, and kept as a tarball, so that the next daemon takes seconds.
Elsewhere the daemon builds it, from Debian's own image. Knows one daemon, no sandbox.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import zstandard

from polar.errors import SandboxError
from polar.folders import cache_dir
from polar.runtime.daemon import Daemon, said

BASE_IMAGE = "localhost/polar-base:bookworm"
"""The default image of the docker backend, and what the bundled tasks name."""
SUITE = "bookworm"
PACKAGES = ("ca-certificates", "git", "patch", "procps", "python3", "python3-pytest")
RECIPE = 1
"""Raised when the tarball's content changes: an older one is not used."""
BUILD_S = 1800.0
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_LABEL = "polar.base"

Progress = Callable[[str], None]


def cache_folder() -> Path:
    """Where tarballs of images are kept."""
    return cache_dir() / "images"


async def build_base(daemon: Daemon, *, tag: str = BASE_IMAGE, progress: Progress | None = None, again: bool = False) -> str:
    """Makes the base image under `tag` at this daemon, unless it is there; `again` makes it anew from fresh packages. Returns `tag`.

    One build at a time on this machine: others wait for it. Raises `SandboxError` with what failed and what to do.
    """
    say = progress or (lambda _: None)
    async with alone(tag):
        if not again and await present(daemon, tag):
            return tag
        problem = cannot_debootstrap()
        if problem is None:
            tarball = await asyncio.to_thread(_tarball, say, again)
            say(f"importing {tarball.name} as {tag}")
            await _import(daemon, tarball, tag)
        else:
            say(f"building {tag} at the daemon ({problem})")
            await build(daemon, _context(), tag, labels={_LABEL: str(RECIPE)}, progress=say)
    return tag


async def present(daemon: Daemon, image: str) -> bool:
    """Whether the daemon has that image. Raises `SandboxError` where it does not answer."""
    import aiodocker

    with said(f"looking for the image {image}"):
        try:
            await daemon.docker.images.inspect(image)
        except aiodocker.DockerError as error:
            if error.status == 404:
                return False
            raise
    return True


async def build(daemon: Daemon, context: io.IOBase, tag: str, *, labels: dict[str, str], progress: Progress) -> None:
    """Builds an image from a tar of its context. Raises `SandboxError` with the end of the build's output."""
    tail: list[str] = []
    with said(f"building the image {tag}"):
        stream = daemon.docker.images.build(
            fileobj=context, encoding="identity", tag=tag, labels=labels, rm=True, forcerm=True, stream=True
        )
        try:
            async with asyncio.timeout(BUILD_S):
                async for chunk in stream:
                    for line in str(chunk.get("stream") or chunk.get("status") or "").splitlines():
                        if line.strip():
                            tail = [*tail[-20:], line.strip()]
                            progress(line.strip())
        except TimeoutError:
            raise SandboxError(f"building the image {tag}: not done after {BUILD_S:g} s; the end: {' | '.join(tail)}") from None
    if not await present(daemon, tag):
        raise SandboxError(f"building the image {tag} failed; the end of its output: {' | '.join(tail)}")


def cannot_debootstrap() -> str | None:
    """Why this machine can't make the image by itself; `None` where it can."""
    if os.geteuid() != 0:
        return "debootstrap needs root"
    if shutil.which("debootstrap") is None:
        return "there is no program debootstrap"
    return None


@asynccontextmanager
async def alone(name: str) -> AsyncIterator[None]:
    """Keeps others on this machine from making the same image at the same time."""
    folder = cache_folder()
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    handle = os.open(folder / f"{name.replace('/', '_').replace(':', '_')}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # polled: a thread that waits for a lock could not be cancelled
                await asyncio.sleep(0.2)
        yield
    finally:
        os.close(handle)


def _tarball(say: Progress, again: bool) -> Path:
    """The image's file system as a tarball in the cache, made where it is missing."""
    folder = cache_folder()
    target = folder / f"polar-base-{SUITE}-{RECIPE}.tar.zst"
    if target.is_file() and not again:
        return target
    with tempfile.TemporaryDirectory(dir=folder, prefix=".debootstrap-") as made:
        root = Path(made) / "root"
        say(f"debootstrap {SUITE}: a minute or two")
        log = Path(made) / "log"
        with log.open("wb") as out:
            ended = subprocess.run(
                ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                timeout=BUILD_S,
                env={**_ENVIRONMENT, "HOME": made, "DEBIAN_FRONTEND": "noninteractive", **_proxies()},
            )
        if ended.returncode != 0:
            inner = root / "debootstrap" / "debootstrap.log"
            said_ = (inner if inner.is_file() else log).read_text(errors="replace").strip()[-500:]
            raise SandboxError(f"debootstrap {SUITE} failed with exit code {ended.returncode}: {said_}")
        for waste in ("var/cache/apt/archives", "var/lib/apt/lists", "var/log"):
            shutil.rmtree(root / waste, ignore_errors=True)
            (root / waste).mkdir(parents=True, exist_ok=True)
        (root / "etc" / "resolv.conf").unlink(missing_ok=True)
        say(f"packing {target.name}")
        part = Path(made) / "part"
        with (
            part.open("wb") as file,
            zstandard.ZstdCompressor(level=3).stream_writer(file) as packed,
            tarfile.open(fileobj=packed, mode="w|") as archive,
        ):
            archive.add(root, arcname=".", filter=_without_devices)
        part.rename(target)
    return target


def _without_devices(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """A container gets devices of its own."""
    return None if member.isdev() else member


def _proxies() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.lower() in ("http_proxy", "https_proxy", "no_proxy")}


async def _import(daemon: Daemon, tarball: Path, tag: str) -> None:
    repository, _, version = tag.rpartition(":")
    changes = [f"ENV {name}={value}" for name, value in _ENVIRONMENT.items()]
    named = [("changes", one) for one in changes]
    if daemon.podman is not None:  # its form of Docker's import forgets the changes and the name
        path, params = "libpod/images/import", [("reference", tag), *named]
    else:
        path, params = "images/create", [("fromSrc", "-"), ("repo", repository), ("tag", version), *named]
    with said(f"importing the image {tag}"):
        async with daemon.request("POST", path, params=params, data=_unpacked(tarball)) as response:
            answer = await response.text()
    if not await present(daemon, tag):
        raise SandboxError(f"importing the image {tag}: the daemon answered {answer.strip()[-300:]}")


async def _unpacked(tarball: Path) -> AsyncIterator[bytes]:
    def chunks() -> Iterator[bytes]:
        with tarball.open("rb") as file:
            yield from zstandard.ZstdDecompressor().read_to_iter(file, write_size=1 << 20)

    pieces = chunks()
    while (piece := await asyncio.to_thread(next, pieces, b"")) != b"":
        yield piece


def _context() -> io.IOBase:
    """A build context with nothing but the Dockerfile of the base image."""
    environment = " ".join(f"{name}={value}" for name, value in _ENVIRONMENT.items())
    text = (
        f"FROM docker.io/library/debian:{SUITE}-slim\n"
        f"RUN apt-get update && apt-get install -y --no-install-recommends {' '.join(PACKAGES)} && rm -rf /var/lib/apt/lists/*\n"
        f"ENV {environment}\n"
    ).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("Dockerfile")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    packed.seek(0)
    return packed
