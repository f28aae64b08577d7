"""New weights for SGLang, by its documented interface ("SGLang for RL systems", 0.5.23): updates from disk, adapters, pauses.

Not run against a real SGLang, which needs a GPU: tested against a server written from the documented fields (`polar.testing.sglang`).
"""

from __future__ import annotations

import asyncio
import time

from polar.chat import JsonObject
from polar.engines.http import HttpEngine
from polar.errors import ConfigError, EngineError, EngineRejected, EngineUnavailable

RETRY_S = 0.1


class SglangWeights(HttpEngine):
    """The weight side of `SglangEngine`. Answers name the version that they were sampled with (`meta_info.weight_version`)."""

    async def update_weights(self, folder: str, version: str, *, timeout_s: float = 600.0) -> None:
        body: JsonObject = {"model_path": folder, "flush_cache": True, "weight_version": version}
        undefined = "Restart it: its weights are undefined."
        try:
            answer = await self.post("/update_weights_from_disk", body, timeout_s=timeout_s)
        except EngineRejected as error:
            if error.status in (404, 405):
                raise ConfigError(f"{self.url} has no /update_weights_from_disk: is it SGLang?") from error
            hint = f"does the path {folder} exist on its machine, with safetensors of the served model?"
            raise EngineUnavailable(f"{self.url} could not load {folder} ({error.message}); {hint} {undefined}") from error
        if not isinstance(answer, dict) or not answer.get("success"):
            words = answer.get("message") if isinstance(answer, dict) else None
            raise EngineUnavailable(f"{self.url} could not load {folder}: {words or 'no reason given'}. {undefined}")

    async def load_adapter(self, folder: str, name: str, version: str, *, timeout_s: float = 600.0) -> None:
        """Needs `--enable-lora` at the server. SGLang loads no adapter over another: the earlier one of that name goes first."""
        try:
            await self.post("/unload_lora_adapter", {"lora_name": name}, timeout_s=timeout_s)
        except EngineRejected as error:
            if error.status in (404, 405):
                raise ConfigError(f"{self.url} takes no adapters; start it with --enable-lora") from error
            # 400: there was none of that name
        try:
            answer = await self.post("/load_lora_adapter", {"lora_name": name, "lora_path": folder}, timeout_s=timeout_s)
        except EngineRejected as error:
            raise EngineUnavailable(
                f"{self.url} refuses the adapter in {folder} ({error.message}): does the path exist on its machine?"
            ) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineUnavailable(f"{self.url} refuses the adapter in {folder}: {answer.get('error_message') or answer.get('message')}")
        await self.reset_prefix_cache()
        await self.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def reset_prefix_cache(self, *, patience_s: float = 10.0) -> None:
        """A flush is refused (400) while requests run."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                await self.post("/flush_cache", {}, parse=lambda raw: raw)  # it answers in plain words
            except EngineRejected as error:
                if error.status in (404, 405) or time.monotonic() > deadline:
                    raise EngineError(f"{self.url} does not forget its prefixes: {error.message}") from error
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def weight_version(self) -> str | None:
        """Of `/get_model_info` (`/model_info`), else of `/server_info`."""
        for path in ("/model_info", "/get_model_info"):
            try:
                answer = await self.get(path)
            except EngineRejected:
                continue
            if isinstance(answer, dict) and "weight_version" in answer:
                return _told(answer["weight_version"])
        return _told((await self._server_info()).get("weight_version"))

    async def pause(self, *, abort: bool = False, timeout_s: float = 600.0) -> bool:
        """SGLang has no pause that waits: its gateways have drained it, and what else is in flight is kept where it stands (`retract`,
        which lets the cache be flushed) and goes on with the new weights; those calls are not the gateway's."""
        return await self.post_if_there("/pause_generation", {"mode": "abort" if abort else "retract"}, timeout_s=timeout_s)

    async def resume(self) -> None:
        await self.post_if_there("/continue_generation", {})

    async def _server_info(self) -> JsonObject:
        for path in ("/server_info", "/get_server_info"):
            try:
                answer = await self.get(path)
            except EngineRejected:
                continue
            if isinstance(answer, dict):
                return answer
        return {}


def _told(version: object) -> str | None:
    """ "default" is what it says until somebody tells it a version."""
    return None if version in (None, "default") else str(version)
