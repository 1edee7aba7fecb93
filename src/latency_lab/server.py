"""vLLM's OpenAI-compatible server on an engine that runs in this process: the app of `vllm serve`, on 127.0.0.1.

The server is on the event loop of its engine, as it is in `vllm serve` (whose loop is uvloop's; a notebook's is
asyncio's own). It could not be elsewhere: vLLM hands out tokens on the loop that its front end was started on.

What differs in this between vLLM versions 0.24 to 0.33 is kept in `_parts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

from latency_lab.engine import Engine
from latency_lab.openai_source import Address, allow_many_sockets


class ServerNotStarted(Exception):
    """A server that did not start; the message says why in one line."""


KEEP_ALIVE_S = 3600
"""How long an idle connection is left open. vLLM's 5 s is also what many clients wait for, and a request that is sent
just when the server lets go of its connection is lost: that would be a failure of the client's, not of the engine."""

END_PATIENCE_S = 5
"""Requests that still run when the server ends are cut off after so long."""


@contextlib.asynccontextmanager
async def serving(engine: Engine, model: str) -> AsyncIterator[Address]:
    """Serve an engine under the name `model` while the block runs; the engine lives on. Raises ServerNotStarted."""
    key = secrets.token_urlsafe(32)
    try:
        app = await _app(engine.llm, model, key)
    except Exception as error:  # whatever a vLLM of another version finds missing
        raise ServerNotStarted(
            f"vLLM's OpenAI-compatible server did not start: {type(error).__name__}: {error}"
        ) from error
    async with listening(app) as url:
        yield Address(url, model, key)


@contextlib.asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """Run an ASGI app on a free port of 127.0.0.1 while the block runs; gives the base URL of its API."""
    import uvicorn

    allow_many_sockets()
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=END_PATIENCE_S,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # Ctrl-C stays the notebook's
    app.state.server = server  # where vLLM's handler of a dead engine looks for it
    # Said to be TCP, or asyncio does not turn off Nagle's algorithm, as uvloop does under `vllm serve`: a small write
    # could wait for the receipt of the one before.
    tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    with tcp as listener, _logging_as_vllm():
        listener.bind(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:
                if task.done():
                    await task
                    raise ServerNotStarted("vLLM's OpenAI-compatible server did not start; see the engine's log")
                await asyncio.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            await task


async def _app(llm: Any, model: str, key: str) -> Any:
    """The app as `vllm serve` makes it, with its defaults for all but model and key."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    make_arg_parser, build_app, init_app_state = _parts()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.model, args.served_model_name, args.api_key = llm.model_config.model, [model], [key]
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    return app


def _parts() -> tuple[Any, Any, Any]:
    """What vLLM makes its server from: make_arg_parser, build_app, init_app_state.

    They moved from entrypoints.openai to entrypoints.launchers by 0.30, the arguments to entrypoints.common in 0.33.
    """
    launchers, openai = "vllm.entrypoints.launchers", "vllm.entrypoints.openai"
    places = {
        "make_arg_parser": ("vllm.entrypoints.common.cli_args", f"{launchers}.cli_args", f"{openai}.cli_args"),
        "build_app": (f"{launchers}.app", f"{openai}.api_server"),
        "init_app_state": (f"{launchers}.api_server.app_state", f"{openai}.api_server"),
    }
    return tuple(_first(name, modules) for name, modules in places.items())


def _first(name: str, modules: tuple[str, ...]) -> Any:
    for module in modules:
        with contextlib.suppress(ImportError):
            return getattr(importlib.import_module(module), name)
    raise ImportError(f"no {name} in {', '.join(modules)}")


@contextlib.contextmanager
def _logging_as_vllm() -> Iterator[None]:
    """Send what uvicorn logs where vLLM's log goes: the engine's log file."""
    logger = logging.getLogger("uvicorn")
    saved = logger.handlers
    logger.handlers = logging.getLogger("vllm").handlers
    try:
        yield
    finally:
        logger.handlers = saved
