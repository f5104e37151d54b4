"""The embedded server: the engine behind SGLang's HTTP interface, on loopback, speculation switchable per request.

    python -m eval.server JOB        what eval.launcher starts, for `eyas serve` and for a measurement

Routes: /health, /health_generate, /v1/models, /v1/chat/completions, /generate, /tokenize, /detokenize, /flush_cache, /server_info,
/model_info.
One request decodes at a time, others wait; a client that hangs up stops its request. There is no authentication.
"""

import asyncio
import json
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from eval import protocol
from eval.clients import BASELINE
from eval.engine import Engine, Generation
from eval.jobs import Ask, Cancelled, DecodingThread, Job
from eval.protocol import ChatRequest, DetokenizeRequest, GenerateRequest, Message, SamplingParams, TokenizeRequest, Wire
from eval.text_stream import TextStream
from eyas import __version__
from eyas.config import Config
from eyas.conventions import family_of
from eyas.errors import EyasError
from eyas.files import read_json
from eyas.folder import DrafterFolder, read_drafter
from eyas.manifest import NAME as MANIFEST
from eyas.manifest import read_manifest
from eyas.target import Target, open_target, pick_device
from eyas.tokenizer import ChatTokenizer

BODY_LIMIT = 8 << 20  # bytes of a request
DISCONNECT_POLL_S = 0.1
CLIENT_GONE = 499
log = logging.getLogger("eyas.server")
W = TypeVar("W", bound=Wire)


@dataclass(frozen=True)
class Served:
    """All that the routes need: the loaded engine, names, and what /server_info tells."""

    engine: Engine
    tokenizer: ChatTokenizer
    model_name: str
    default: str
    info: dict[str, Any]


class Refused(Exception):
    """A request that gets an error answer instead of a reply."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.status = message, param, status


def load(config: Config, drafters: dict[str, str], default: str | None = None) -> Served:
    """Load target and drafters (name -> folder or hub id). ``default`` serves requests that name none: by default the first drafter.

    Raises EyasError for a name that is taken, a default that is not there, and whatever reading and fitting them finds.
    """
    default = default or next(iter(drafters), BASELINE)
    if BASELINE in drafters:
        raise EyasError(f"a drafter cannot be called {BASELINE!r}: that name switches speculation off")
    if default not in {BASELINE, *drafters}:
        raise EyasError(f"the default drafter {default!r} is not among {', '.join(drafters) or 'the drafters (there are none)'}")
    _say("loading the target")
    target = open_target(config.target)
    device, dtype = pick_device(config.target.device), getattr(torch, config.engine.dtype)
    family = family_of(target.shape.model_type)
    folders = {}
    for number, (name, path) in enumerate(drafters.items(), 1):
        _say(f"loading drafter {name} ({number} of {len(drafters)})")
        folders[name] = _as_captured(read_drafter(path, dtype, family), path, config)
    engine = Engine(target, folders, dtype, config.engine.context, config.engine.draft_steps, device, config.engine.sampling)
    return Served(engine, target.tokenizer(), target.name, default, _server_info(config, target, drafters, default, engine, device))


def _say(text: str) -> None:
    """A line of the log, with its time, as SGLang writes them."""
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}", flush=True)


def _as_captured(folder: DrafterFolder, path: str, config: Config) -> DrafterFolder:
    """A drafter that does not tell its layers is served on those that the run names or measured for it, where it can mean them."""
    if folder.layers is not None:
        return folder
    named = tuple(config.prep.states.layers or ())
    fits = named in folder.candidates or not folder.candidates
    layers = named if named and fits else _measured(path, config)
    return replace(folder, layers=layers) if layers else folder


def _measured(path: str, config: Config) -> tuple[int, ...]:
    """The layers that prep found the run's warm start to have been trained on; none for other drafters."""
    states = config.folder("states/train")
    if path != config.drafter.init or not (states / MANIFEST).is_file():
        return ()
    record = read_manifest(states, "states").holds.get("warm_start")
    return tuple(record["layers"]) if record else ()


def _server_info(
    config: Config, target: Target, drafters: dict[str, str], default: str, engine: Engine, device: torch.device
) -> dict[str, Any]:
    steps = config.engine.draft_steps
    speculates = default != BASELINE
    return {
        "model_path": target.name,
        "served_model_name": target.name,
        "revision": target.revision,
        "dtype": config.engine.dtype,
        "device": str(device),
        "context_length": config.engine.context,
        "max_running_requests": 1,
        "disable_radix_cache": True,
        "speculative_algorithm": "EAGLE3" if speculates else None,
        "speculative_draft_model_path": drafters.get(default),
        "speculative_num_steps": steps if speculates else None,
        "speculative_eagle_topk": 1 if speculates else None,
        "speculative_num_draft_tokens": steps + 1 if speculates else None,
        "version": f"eyas {__version__}",
        "eyas": {
            "drafters": list(drafters),
            "default": default,
            "draft_steps": steps,
            "layers": {name: list(layers) for name, layers in engine.layers.items()},
            "threads": torch.get_num_threads(),
            "target_digest": target.digest,
        },
    }


def create_app(served: Served) -> FastAPI:
    """The application around a loaded engine."""
    line = DecodingThread(served.engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        line.cancel_all()
        await asyncio.to_thread(line.close)

    app = FastAPI(title="eyas", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.line = line
    _add_error_handlers(app)
    _add_management(app, served, line)
    _add_generation(app, served, line)
    _add_tokenizer(app, served)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return JSONResponse(protocol.error_body(error.message, error.status, error.param), error.status)

    @app.exception_handler(EyasError)
    async def not_servable(request: Request, error: EyasError) -> Response:
        return JSONResponse(protocol.error_body(str(error), 400), 400)

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        return JSONResponse(
            protocol.error_body(f"{request.method} {request.url.path}: {error.detail}", error.status_code), error.status_code
        )

    @app.exception_handler(Cancelled)
    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return JSONResponse(protocol.error_body("the server failed on this request; its log tells why", 500), 500)


def _add_management(app: FastAPI, served: Served, line: DecodingThread) -> None:
    model = {"id": served.model_name, "object": "model", "created": 0, "owned_by": "eyas", "root": served.model_name, "parent": None}
    model["max_model_len"] = served.engine.context

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        # A busy engine is a healthy one; asking it for a token would only wait in line.
        if not line.busy:
            await _whole(request, line.submit(Ask([0], 1, 0.0, 0, None, None)))
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        if line.busy:
            return PlainTextResponse("Requests are running or waiting.\n", 400)
        return PlainTextResponse("There is no prefix cache: every request starts cold.\n")

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        return served.info

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        name = served.model_name
        return {"model_path": name, "served_model_name": name, "tokenizer_path": name, "is_generation": True}


def _add_generation(app: FastAPI, served: Served, line: DecodingThread) -> None:
    @app.post("/generate")
    async def generate(request: Request) -> Response:
        asked = await _read(request, GenerateRequest)
        prompt_ids = asked.input_ids if asked.input_ids is not None else _encode(served, asked.text or "")
        job = line.submit(_ask(served, prompt_ids, asked.sampling, asked.speculative), streamed=asked.stream)
        if asked.stream:
            return EventStream(job, _generate_events(served, job, asked.sampling))
        generation = await _whole(request, job)
        return JSONResponse(_generate_event(served, job, generation, _text(served, generation, asked.sampling)))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = await _read(request, ChatRequest)
        prompt_ids = _render(served, asked.messages, asked.chat_template_kwargs)
        job = line.submit(_ask(served, prompt_ids, asked.sampling, asked.speculative), streamed=asked.stream)
        if asked.stream:
            return EventStream(job, _chat_events(served, job, asked))
        generation = await _whole(request, job)
        text, steps = _text(served, generation, asked.sampling), served.engine.draft_steps
        info = protocol.meta_info(job.id, generation, steps, job.latency_s)
        return JSONResponse(protocol.chat_answer(asked, job.id, served.model_name, text, generation, info, steps))


def _add_tokenizer(app: FastAPI, served: Served) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        asked = await _read(request, TokenizeRequest)
        if asked.messages is not None:
            ids = _render(served, asked.messages, asked.chat_template_kwargs)
        else:
            ids = _encode(served, asked.prompt or "", asked.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": served.engine.context}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        asked = await _read(request, DetokenizeRequest)
        return {"text": _decode(served, asked.tokens, asked.skip_special_tokens)}


class EventStream(StreamingResponse):
    """Server-sent events of a job; the job ends with the connection."""

    def __init__(self, job: Job, events: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(self._lines(events), media_type="text/event-stream")
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send; whatever ends it, the job is over."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()

    async def _lines(self, events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
        try:
            async for event in events:
                yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
        except (EyasError, Cancelled) as error:
            message = str(error) or "the server is shutting down"
            yield f"data: {json.dumps(protocol.error_body(message, 400 if isinstance(error, EyasError) else 503))}\n\n"
        except Exception:
            # The answer has begun, so this is the only way left to tell the client.
            log.exception("request %s failed", self._job.id)
            yield f"data: {json.dumps(protocol.error_body('the server failed on this request; its log tells why', 500))}\n\n"
        yield "data: [DONE]\n\n"


async def _generate_events(served: Served, job: Job, sampling: SamplingParams) -> AsyncIterator[dict[str, Any]]:
    """Pieces of /generate as SGLang streams them: each holds all text and ids so far, the last one the final meta_info too.

    A piece goes out as soon as its tokens are known, for a client takes the time of the first one; so the last piece brings no new token.
    """
    stream, ids = TextStream(served.tokenizer, sampling.skip_special_tokens), list[int]()
    async for new in job.pieces():
        stream.add(_without_stops(job, new))
        ids += new
        info = protocol.partial_meta_info(job.id, len(job.ask.prompt_ids), len(ids))
        yield {"text": stream.text, "output_ids": ids, "meta_info": info}
    generation = await job.result()
    yield _generate_event(served, job, generation, _text(served, generation, sampling))


def _generate_event(served: Served, job: Job, generation: Generation, text: str) -> dict[str, Any]:
    info = protocol.meta_info(job.id, generation, served.engine.draft_steps, job.latency_s)
    return {"text": text, "output_ids": generation.output_ids, "meta_info": info}


async def _chat_events(served: Served, job: Job, asked: ChatRequest) -> AsyncIterator[dict[str, Any]]:
    name, stream = served.model_name, TextStream(served.tokenizer, asked.skip_special_tokens)
    yield protocol.chat_chunk(job.id, name, {"role": "assistant", "content": ""})
    async for new in job.pieces():
        if piece := stream.add(_without_stops(job, new)):
            yield protocol.chat_chunk(job.id, name, {"content": piece})
    generation = await job.result()
    if piece := stream.end():
        yield protocol.chat_chunk(job.id, name, {"content": piece})
    last = protocol.chat_chunk(job.id, name, {}, protocol.finish_reason(generation))
    yield last | protocol.sglext(asked, generation, served.engine.draft_steps)
    if asked.stream_options.include_usage:
        yield protocol.chat_chunk(job.id, name, {}) | {"choices": [], "usage": protocol.usage(generation)}


def _without_stops(job: Job, new: list[int]) -> list[int]:
    """A stop token ends the ids of a reply, its text ends before it."""
    return [token for token in new if token not in (job.ask.stop_ids or ())]


async def _read(request: Request, kind: type[W]) -> W:
    """Read and validate a body; anything wrong with it is a Refused that names the field."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_LIMIT:
            raise Refused(f"the request is larger than {BODY_LIMIT >> 20} MiB")
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        message = first["msg"].removeprefix("Value error, ")
        raise Refused(f"{param}: {message}" if param else message, param) from None


def _ask(served: Served, prompt_ids: list[int], sampling: SamplingParams, speculative: str | None) -> Ask:
    name = speculative or served.default
    if name not in {BASELINE, *served.engine.drafters}:
        raise Refused(f"speculative: no drafter {name!r}; there are {', '.join([BASELINE, *served.engine.drafters])}", "speculative")
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(served.engine.stop_ids))
    ask = Ask(
        prompt_ids=prompt_ids,
        max_new_tokens=sampling.max_new_tokens,
        temperature=0.0 if sampling.temperature < protocol.GREEDY_BELOW else sampling.temperature,
        seed=random.getrandbits(63) if sampling.sampling_seed is None else sampling.sampling_seed,
        drafter=None if name == BASELINE else name,
        stop_ids=sorted(stops),
    )
    served.engine.check(ask.prompt_ids, ask.max_new_tokens, ask.temperature, ask.drafter)
    return ask


def _encode(served: Served, text: str, special_tokens: bool = True) -> list[int]:
    try:
        return list(served.tokenizer.encode(text, add_special_tokens=special_tokens))
    except (TypeError, UnicodeError) as error:  # lone surrogates
        raise Refused(f"text cannot be tokenised: {error}", "text") from None


def _render(served: Served, asked: list[Message], options: dict[str, Any]) -> list[int]:
    messages = [message.plain() for message in asked]
    if reserved := {"conversation", "tokenize", "add_generation_prompt", "return_dict", "chat_template"} & set(options):
        raise Refused(f"chat_template_kwargs: {min(reserved)} cannot be set", "chat_template_kwargs")
    try:
        rendered = served.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False, **options)
    except (jinja2.TemplateError, ValueError, TypeError, UnicodeError) as error:
        raise Refused(f"messages do not fit the chat template: {error}", "messages") from None
    return list(rendered)


def _text(served: Served, generation: Generation, sampling: SamplingParams) -> str:
    ids = generation.output_ids[:-1] if generation.finish_reason == "stop" else generation.output_ids
    return _decode(served, ids, sampling.skip_special_tokens)


def _decode(served: Served, ids: list[int], skip_special_tokens: bool) -> str:
    return str(served.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))


async def _whole(request: Request, job: Job) -> Generation:
    """Wait for a job; a client that hangs up cancels it."""
    waiting = asyncio.ensure_future(job.result())
    try:
        while not (await asyncio.wait({waiting}, timeout=DISCONNECT_POLL_S))[0]:
            if await request.is_disconnected():
                job.cancel()
        return await waiting
    finally:
        job.cancel()


def run_server(
    config: Config,
    drafters: dict[str, str],
    default: str | None = None,
    port: int | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        config: target, engine.host, engine.port, engine.context ...
        drafters: name -> folder or hub id.
        default: drafter of requests that name none, "none" for the baseline; by default the first drafter.
        port: overrides engine.port; 0 takes a free one.

    Raises EyasError when the port is taken or something cannot be loaded.
    """
    with _bind(config.engine.host, config.engine.port if port is None else port) as listener:
        app = create_app(load(config, drafters, default))
        bound = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2))
        _say(f"serving {config.target.model} on http://{config.engine.host}:{bound} with {', '.join(drafters) or 'no drafter'}")
        server.run(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio turns Nagle's delay off only on sockets that name their protocol
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise EyasError(f"engine.host {host}: {error.strerror or error}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise EyasError(f"cannot listen on {host}:{port}: {reason}; choose another engine.port, or 0 for a free one") from None
    return listener


def _end_with_parent() -> None:
    """Terminate when stdin closes: the parent holds its other end, so a parent that was killed leaves no server behind."""

    def watch() -> None:
        # not sys.stdin: its lock, held here, would abort an interpreter that ends for another reason
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main(job: Path) -> int:
    """What ``eval.launcher`` starts: serve what the job file says until stdin closes; 1 after an error, said in one line."""
    _end_with_parent()
    asked = read_json(job)
    try:
        run_server(Config.model_validate(asked["config"]), asked["drafters"], asked["default"])
    except EyasError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
