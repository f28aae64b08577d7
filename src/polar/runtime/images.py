"""Which image a sandbox starts from: the one named, one built from its folder, or Polar's own. Knows one daemon, no sandbox."""

from __future__ import annotations

import asyncio
import re
import tarfile
import tempfile
from pathlib import Path
from typing import IO, Literal

from polar.errors import ConfigError, SandboxError
from polar.folders import cache_dir
from polar.runtime.base_image import BASE_IMAGE, BUILD_S, Progress, alone, build, build_base, present
from polar.runtime.daemon import Daemon, discover, said
from polar.runtime.folder_hash import folder_hash, inside

__all__ = ["BASE_IMAGE", "build_base", "ensure", "make_base", "tagged"]

BUILT = "localhost/polar-built"
"""Repository of images built from a task's folder; the tag is the hash of what is in it."""
Pull = Literal["missing", "never", "always"]


async def make_base(*, tag: str = BASE_IMAGE, docker_host: str | None = None, progress: Progress | None = None, again: bool = False) -> str:
    """Makes the base image at this machine's daemon, for people; `build_base` says the rest."""
    address = await discover(docker_host)
    async with await Daemon.open(address, folder=cache_dir() / "podman") as daemon:
        return await build_base(daemon, tag=tag, progress=progress, again=again)


async def ensure(
    daemon: Daemon,
    image: str | None,
    build_context: Path | None = None,
    *,
    pull: Pull = "missing",
    progress: Progress | None = None,
) -> str:
    """The reference of an image that the daemon has: `image` (pulled where it is missing), or built from the folder `build_context`
    (once for each content), or the base image (made where it is missing).

    Raises `ConfigError` where there is no such image (or no Dockerfile) and no second try could find it; `SandboxError`, with the daemon's
    own words, for whatever else goes wrong: a daemon or a registry that does not answer, a build that fails.
    """
    say = progress or (lambda _: None)
    if build_context is not None:
        return await _built(daemon, build_context, say)
    if image is None or image == BASE_IMAGE:
        return await build_base(daemon, progress=progress)
    if pull == "always" or not await present(daemon, image):
        if pull == "never" or image.startswith("localhost/"):
            raise ConfigError(f"runtime.image: the image {image} is not on this machine, and is none that could be pulled: build it first")
        async with alone(image):
            if pull == "always" or not await present(daemon, image):
                await _pull(daemon, image, say)
    return image


def tagged(image: str) -> str:
    """With `:latest` where neither tag nor digest is named: the API would pull every tag there is."""
    return image if "@" in image or ":" in image.rpartition("/")[2] else f"{image}:latest"


async def _built(daemon: Daemon, folder: Path, say: Progress) -> str:
    if not await asyncio.to_thread((folder / "Dockerfile").is_file):
        raise ConfigError(f"runtime.build_context: there is no Dockerfile in {folder}")
    tag = f"{BUILT}:{await asyncio.to_thread(folder_hash, folder)}"
    async with alone(tag):
        if not await present(daemon, tag):
            # builds from Polar's own image are the rule where nothing can be pulled
            if BASE_IMAGE in await asyncio.to_thread((folder / "Dockerfile").read_text, errors="replace"):
                await build_base(daemon, progress=say)
            with tempfile.TemporaryFile() as packed:
                await asyncio.to_thread(_pack, folder, packed)
                await build(daemon, packed, tag, labels={"polar.built": tag.rpartition(":")[2]}, progress=say)
    return tag


def _pack(folder: Path, file: IO[bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive:
        for path in inside(folder):
            archive.add(path, arcname=str(path.relative_to(folder)), recursive=False)
    file.seek(0)


async def _pull(daemon: Daemon, image: str, say: Progress) -> None:
    last = ""
    try:
        with said(f"pulling the image {image}"):
            async with asyncio.timeout(BUILD_S):
                async for chunk in daemon.docker.images.pull(tagged(image), stream=True):
                    status = str(chunk.get("status", ""))
                    if status and status != last:
                        last = status
                        say(f"{image}: {status}")
    except SandboxError as error:
        if no_such_image(str(error)):
            raise ConfigError(f"runtime.image: {error}") from error
        raise


_NO_SUCH_IMAGE = re.compile(
    r"manifest unknown|name unknown|repository does not exist|requested access to the resource is denied|invalid reference format"
    r"|short-name .* did not resolve|failed to resolve reference .*: not found$|no matching manifest for|no image found in",
    re.IGNORECASE | re.DOTALL,
)


def no_such_image(message: str) -> bool:
    """Whether a daemon's words mean that the registry has answered and there is no such image, or none for this machine. (Registries hide
    what is private, so both are denied in the same words.)"""
    return _NO_SUCH_IMAGE.search(message) is not None
