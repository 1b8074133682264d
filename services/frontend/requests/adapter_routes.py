"""Routes that load and unload adapters while the server runs, with the names and the answers of
vLLM's.

The launcher says whether an adapter may be loaded, and gives it to workers that it starts later.
Each engine loads it beside its steps; only then it is a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.shown_values import show
from penstock.protocol.wire.messages.administration import (
    ADMIT_ADAPTER,
    FORGET_ADAPTER,
    KEEP_ADAPTER,
    LOAD_ADAPTER,
    UNLOAD_ADAPTER,
    AdapterAnswer,
    AdapterPlace,
    AdapterProgress,
)
from penstock.services.frontend.bodies.administration import LoadAdapterBody, UnloadAdapterBody
from penstock.services.frontend.context import CONTEXT, Context
from penstock.services.frontend.errors import INVALID_REQUEST, ApiError, retry_after
from penstock.services.frontend.keys.known_key import Right
from penstock.services.frontend.request_body import read_body

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
RIGHTS: dict[str, Right] = dict.fromkeys((LOAD, UNLOAD), "admin")
LOOK_SECONDS = 0.05
"""Who waits for an adapter looks so often how far it is."""
SILENT_SECONDS = 20.0
"""An engine may not answer for so long: one of its processes may be starting again."""
LOAD_SECONDS = 600.0
"""By then every engine has loaded an adapter, or it is given up."""
HEARD_SECONDS = 10.0
"""By then this process has heard what an engine has said of itself."""
_KINDS = {403: "permission_error", 404: "not_found_error", 503: "overloaded_error"}


async def load_adapter(request: web.Request) -> web.Response:
    """``POST /v1/load_lora_adapter``."""
    context, body = request.app[CONTEXT], await read_body(request, LoadAdapterBody)
    name = body.lora_name
    if name in context.awaited:
        raise ApiError(409, f"The adapter {show(name)} is being loaded", code="adapter_loading")
    if not body.load_inplace and _adapter(context, name) is not None:
        raise ApiError(
            400,
            f"The lora adapter {show(name)} has already been loaded; load_inplace replaces it",
            param="lora_name",
            code="adapter_exists",
        )
    async with context.awaited.loading(name):
        admitted = await _launcher(context, ADMIT_ADAPTER, AdapterPlace(name, body.lora_path))
        place = AdapterPlace(name, admitted.folder, secrets.token_hex(8))
        # A worker that starts while others read it has it, too.
        await _launcher(context, KEEP_ADAPTER, place)
        try:
            digest = await _load(context, place)
        except ApiError:
            with contextlib.suppress(ApiError):
                await _launcher(context, FORGET_ADAPTER, AdapterPlace(name, load=place.load))
            raise
        if not await _heard(context, name, digest):
            raise _silent(f"The adapter {show(name)} is loaded, but not served here yet")
    return web.Response(text=f"Success: LoRA adapter {show(name)} added successfully.")


async def unload_adapter(request: web.Request) -> web.Response:
    """``POST /v1/unload_lora_adapter``."""
    context, body = request.app[CONTEXT], await read_body(request, UnloadAdapterBody)
    name = body.lora_name
    kept = await _launcher(context, FORGET_ADAPTER, AdapterPlace(name))
    if not kept.folder and _adapter(context, name) is None:
        raise ApiError(
            404,
            f"The lora adapter {show(name)} cannot be found",
            kind="not_found_error",
            param="lora_name",
            code="adapter_not_found",
        )
    await _engines(context, UNLOAD_ADAPTER, name.encode())
    if not await _heard(context, name, ""):
        raise _silent(f"The adapter {show(name)} is unloaded, but this frontend still knows it")
    return web.Response(text=f"Success: LoRA adapter {show(name)} removed successfully.")


def _adapter(context: Context, name: str) -> ServedModel | None:
    models = context.gateway.models()
    return next((one for one in models if one.name == name and one.parent), None)


async def _load(context: Context, place: AdapterPlace) -> str:
    """The digest of the adapter, once all engines have it. Raises ``ApiError``."""
    about, loop = msgspec.msgpack.encode(place), asyncio.get_running_loop()
    began = heard = loop.time()
    while loop.time() - heard <= SILENT_SECONDS:
        told = await context.gateway.ask("scheduler", LOAD_ADAPTER, about)
        found = [msgspec.msgpack.decode(one, type=AdapterProgress) for one in told]
        for progress in found:
            if progress.state == "failed":
                raise await _refused(context, place, progress.reason, found)
        if len(found) >= _num_engines(context):
            heard = loop.time()
            if found and all(one.state == "loaded" for one in found):
                return found[0].digest
        if loop.time() - began > LOAD_SECONDS:
            reason = f"not every engine had it within {LOAD_SECONDS:g} s"
            raise await _refused(context, place, reason, found)
        await asyncio.sleep(LOOK_SECONDS)
    await _take_back(context, place)
    raise _silent("Not every engine answered")


def _num_engines(context: Context) -> int:
    """Engines of which a process lives. Where only a worker does, it has what it had before, and
    the scheduler that is started for it is to load the adapter, too."""
    parts = [one for one in context.gateway.members() if one.service in ("scheduler", "worker")]
    schedulers = sum(one.service == "scheduler" for one in parts)
    return max(schedulers, len({one.identity.engine for one in parts}))


async def _take_back(context: Context, place: AdapterPlace) -> bool:
    """No engine keeps what another one cannot load, unless it replaced one. Returns whether."""
    is_new = _adapter(context, place.name) is None
    if is_new:
        await _engines(context, UNLOAD_ADAPTER, place.name.encode())
    return is_new


async def _refused(
    context: Context, place: AdapterPlace, reason: str, found: Sequence[AdapterProgress]
) -> ApiError:
    """found: how far each engine is."""
    loaded = sum(one.state == "loaded" for one in found)
    if not await _take_back(context, place) and loaded:
        reason += (
            f"; {loaded} of {len(found)} engines have the new one already, and the others the "
            "former one: load one that all can load with load_inplace, or unload it"
        )
    return ApiError(
        400,
        f"The adapter {show(place.name)} cannot be loaded: {reason}",
        param="lora_path",
        code="adapter_refused",
    )


async def _heard(context: Context, name: str, digest: str) -> bool:
    """Wait until this process knows the adapter, or with an empty digest, knows it no more.
    Returns whether it does by now."""
    loop = asyncio.get_running_loop()
    until = loop.time() + HEARD_SECONDS
    while loop.time() < until and not context.gateway.draining():
        known = _adapter(context, name)
        if (known.adapters[0].digest if known is not None else "") == digest:
            return True
        await asyncio.sleep(LOOK_SECONDS)
    return False


async def _engines(context: Context, what: str, about: bytes) -> None:
    await context.gateway.ask("scheduler", what, about)


async def _launcher(context: Context, what: str, place: AdapterPlace) -> AdapterAnswer:
    """Raises ``ApiError``: what it refuses, or that it cannot be asked."""
    if not any(peer.service == "launcher" for peer in context.gateway.members()):
        raise ApiError(
            501,
            "No `penstock serve` runs this server, so nobody here can load or unload adapters: "
            "start workers with --lora",
            kind="server_error",
            code="no_launcher",
        )
    told = await context.gateway.ask("launcher", what, msgspec.msgpack.encode(place))
    if not told:
        raise _silent("The launcher did not answer")
    answer = msgspec.msgpack.decode(told[0], type=AdapterAnswer)
    if answer.status != 200:
        kind = _KINDS.get(answer.status, INVALID_REQUEST)
        message = answer.message[:1].upper() + answer.message[1:]
        raise ApiError(answer.status, message, kind=kind, code=answer.code)
    return answer


def _silent(what: str) -> ApiError:
    return ApiError(
        503,
        f"{what}; try again",
        kind="overloaded_error",
        code="server_silent",
        headers=retry_after(1.0),
    )


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", LOAD, load_adapter),
    ("POST", UNLOAD, unload_adapter),
)
