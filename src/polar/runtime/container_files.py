"""Files into and out of a container, by the daemon's archive API. Works without any program inside, but for making parent folders.

The daemon resolves paths inside the container's own root, so no link in it leads to the host. What comes out is an untrusted stream, and is
written by `polar.runtime.transfer`, which follows and makes no link that leaves.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import posixpath
import secrets
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp

from polar.errors import SandboxError, UnsafePath
from polar.runtime import transfer
from polar.runtime.container_exec import Container
from polar.runtime.daemon import said
from polar.runtime.owner import remove_tree

CHUNK = 1 << 18
_STAT_HEADER = "X-Docker-Container-Path-Stat"
_GO_FOLDER, _GO_LINK, _GO_TYPES = 1 << 31, 1 << 27, 0x8F28_0000
"""Bits of Go's `fs.FileMode`, in which the daemon tells what a path is."""


async def upload(container: Container, source: Path, target: str) -> None:
    """As `Runtime.upload`. A folder's content is added to what `target` has; files belong to the sandbox's user."""
    folder = await asyncio.to_thread(source.is_dir)
    into, name = (target, ".file") if folder else (posixpath.dirname(target), posixpath.basename(target))
    uid, gid = map(int, container.ids.split(":"))
    staged = container.place.folder / f"going-{secrets.token_hex(4)}"
    try:
        # packed before anything is sent: what is refused must not arrive in part
        await transfer.in_thread(lambda: _packed(source, staged, name, uid, gid))
        if not await _is_folder(container, into):
            await _make(container, into)
        with said(f"copying {source} to {target} in the sandbox {container.place.id}"):
            async with container.daemon.request(
                "PUT", f"containers/{container.id}/archive", params={"path": into}, data=_chunks(staged)
            ) as response:
                await response.read()
    finally:
        await asyncio.to_thread(staged.unlink, missing_ok=True)


async def download(container: Container, source: str, target: Path, *, max_bytes: int) -> None:
    """As `Runtime.download`."""
    mode = await _stat(container, source)
    if mode is None:
        raise FileNotFoundError(source)
    if mode & _GO_TYPES and not mode & _GO_FOLDER:
        raise UnsafePath(f"{source} is {'a link' if mode & _GO_LINK else 'neither a file nor a folder'}")
    staged = container.place.folder / f"coming-{secrets.token_hex(4)}"
    with said(f"copying {source} from the sandbox {container.place.id}"):
        async with container.daemon.request("GET", f"containers/{container.id}/archive", params={"path": source}) as response:
            body = io.BufferedReader(_Body(response.content, asyncio.get_running_loop()), CHUNK)
            await transfer.in_thread(lambda: transfer.extract(body, staged, max_bytes=max_bytes, strip=1))
    try:
        await asyncio.to_thread(move, staged, target)
    finally:
        await asyncio.to_thread(remove_tree, staged)


def _packed(source: Path, staged: Path, name: str, uid: int, gid: int) -> None:
    with staged.open("xb") as file:
        transfer.pack(source, file, single=name)
    if (uid, gid) != (0, 0):
        owned = staged.with_suffix(".owned")
        with tarfile.open(staged, "r:") as old, tarfile.open(owned, "x:", format=tarfile.PAX_FORMAT) as new:
            for member in old:
                member.uid, member.gid = uid, gid
                new.addfile(member, old.extractfile(member) if member.isreg() else None)
        owned.rename(staged)


def move(staged: Path, target: Path) -> None:
    """Puts what was received where it is wanted. Raises `FileExistsError`: it is a new path."""
    if os.path.lexists(target):
        raise FileExistsError(f"{target} stands already")
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.rename(target)


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(path.open, "rb")
    try:
        while data := await asyncio.to_thread(file.read, CHUNK):
            yield data
    finally:
        file.close()


async def _stat(container: Container, path: str) -> int | None:
    """The Go file mode of a path inside, `None` where there is nothing."""
    with said(f"looking at {path} in the sandbox {container.place.id}"):
        try:
            async with container.daemon.request("HEAD", f"containers/{container.id}/archive", params={"path": path}) as response:
                return _mode(response)
        except aiodocker.DockerError as error:
            if error.status == 404:
                return None
            raise


async def _is_folder(container: Container, path: str) -> bool:
    mode = await _stat(container, path)
    return mode is not None and bool(mode & _GO_FOLDER)


_MAKE = """
folder=$1 made=
while [ ! -d "$folder" ]; do
    made=$folder folder=${folder%/*}
    [ -n "$folder" ] || folder=/
done
mkdir -p "$1" && { [ -z "$made" ] || chown -R "$2" "$made"; }
"""
"""Makes a folder with its parents; those that are new belong to the sandbox's user."""


async def _make(container: Container, folder: str) -> None:
    made = await container.run(["/bin/sh", "-c", _MAKE, "polar", folder, container.ids], cwd="/", user="0", timeout_s=60)
    if not made.ok:
        raise SandboxError(f"the folder {folder} could not be made in the sandbox {container.place.id}: {made.tail()}")


def _mode(response: aiohttp.ClientResponse) -> int:
    told = response.headers.get(_STAT_HEADER)
    return int(json.loads(base64.b64decode(told))["mode"]) if told else 0


class _Body(io.RawIOBase):
    """An answer's body for a thread that reads files. Its reads end with an error when the answer is closed."""

    def __init__(self, content: aiohttp.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        self._content = content
        self._loop = loop

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = asyncio.run_coroutine_threadsafe(self._content.read(len(buffer)), self._loop).result()
        buffer[: len(data)] = data
        return len(data)
