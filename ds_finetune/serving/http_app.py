"""HTTP application that serves the model in a folder, run as a process of its own.

It checks each request and passes it to the handlers of `transformers serve`. `ds-finetune serve` starts it as `python
-m ds_finetune.serving.http_app FOLDER ...` for the engines transformers and onnx; for vLLM it starts `vllm serve`.
"""

import argparse
import asyncio
import hmac
import inspect
import json
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import jinja2
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import Modality

from ds_finetune.config.units import MIB
from ds_finetune.data.chat_template import TemplateLimits
from ds_finetune.data.prompt_format import end_ids
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.errors import ConfigError
from ds_finetune.export.formats import format_of
from ds_finetune.foreign.guard import Foreign
from ds_finetune.serving.generation import AnswerState, GenerationStopper, QueueLimits, RequestQueue, stop_position
from ds_finetune.serving.http_guard import BoundedProtocol, HostCheck, HostRules
from ds_finetune.serving.openai_request import (
    AnswerRequest,
    ChatRequest,
    CompletionRequest,
    RequestError,
    parse_request,
)
from ds_finetune.serving.serve import API_KEY

MAX_NEW_TOKENS = 1024
"""Default maximum number of tokens of an answer, as in transformers 5.23 (cli/serving/utils.py:1178)."""
_BODY_BYTES, _BYTES_PER_TOKEN = MIB, 64
"""Maximum bytes of a request's body: the first number, plus the second for each token of the model's context."""
_PIECE = 2**16
"""Number of characters of a long prompt that are tokenised at a time."""
_SHUTDOWN_SECONDS = 2
"""Seconds for which connections may still send and receive after the last answer has ended."""
_PARSING = Foreign("transformers", "cli/serving/utils.py:313, parse_response")


class ServedModel(ModelManager):
    """The served model in the form that the handlers of `transformers serve` expect. They cannot load another model."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder = folder
        self.name = str(folder)
        """Name of the model in requests."""
        super().__init__(device=device, force_model=self.name)
        self.model, self.tokenizer = self.load_model_and_processor(self.name)
        self.context: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.model.generation_config.eos_token_id = end_ids(self._folder, self.model.config, self.tokenizer)

    def _load_model(self, name: str, *_: Any, **__: Any) -> PreTrainedModel:  # noqa: ANN401 - of transformers
        """Load the model of the served folder with `do_sample` set, because transformers 5.23 otherwise ignores the
        temperature of requests (cli/serving/utils.py:1181).
        """
        model = format_of(self._folder).load_engine(self._folder).load_model(self._folder, self.device)
        settings = model.generation_config
        self.is_greedy = settings.do_sample is False
        settings.do_sample = True
        settings.top_k = 0 if settings.top_k is None else settings.top_k
        return model

    def _load_processor(self, name: str, *_: Any, **__: Any) -> PreTrainedTokenizerBase:  # noqa: ANN401 - as above
        tokenizer = load_tokenizer(str(self._folder))
        for name, wrapped in (("parse_response", _parse_or_text), ("apply_chat_template", _within_limits)):
            setattr(tokenizer, name, wrapped(tokenizer))
        return tokenizer

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Name of the model in answers. transformers would append `@main`, which requests may not use."""
        return model_id

    def not_found(self, name: str) -> RequestError:
        """Make the error for a request that names another model."""
        text = f"the model `{name}` was not found; this server serves `{self.name}`"
        return RequestError(404, text, param="model", code="model_not_found")

    def prompt_tokens(self, text: str, *, add_special_tokens: bool) -> int:
        """Number of tokens of a prompt. Prompts far longer than the model's context are counted in part."""
        count, most = 0, 2 * self.context if self.context and len(text) > _PIECE else None
        for begin in range(0, len(text) if most else 0, _PIECE):
            count += len(self.tokenizer(text[begin : begin + _PIECE], add_special_tokens=False)["input_ids"])
            # The limit is twice the context, because a prompt tokenised in pieces may have some more tokens.
            if most and count > most:
                return count
        return len(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def prompt_text(self, request: AnswerRequest) -> str:
        """Render the text of the prompt. RequestError if the chat template fails, takes too long, or drops a part of
        the messages. Call this in the main thread, because the time limit of a template works only there.
        """
        if isinstance(request, CompletionRequest):
            return request.prompt
        assert isinstance(request, ChatRequest)
        template = self.tokenizer.chat_template
        if not template:
            raise RequestError(400, f"`{self.name}` has no chat template: ask /v1/completions", param="messages")
        own_parameters = inspect.signature(self.tokenizer.apply_chat_template).parameters
        for name in request.chat_template_kwargs:
            if name in own_parameters or name not in str(template):
                raise RequestError(400, f"the chat template does not use `{name}`", param="chat_template_kwargs")
        try:
            messages = ChatCompletionHandler.get_processor_inputs_from_messages(request.conversation(), Modality.LLM)
            settings = {"add_generation_prompt": True, "tokenize": False, **request.chat_template_kwargs}
            texts = [
                str(self.tokenizer.apply_chat_template(messages, tools=tools, **settings))
                for tools in ((request.tools, None) if request.tools else (None,))
            ]
        except ConfigError as beyond:
            raise RequestError(400, beyond.message, param="messages") from beyond
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as wrong:
            raise RequestError(400, f"the chat template refuses these messages: {wrong}", param="messages") from wrong
        if len(set(texts)) < len(texts):
            raise RequestError(400, "the chat template ignores `tools`", param="tools")
        # The prompt must contain the texts of user and system messages. A template may leave out an assistant's
        # reasoning, and may write results of tools as JSON.
        for number, message in enumerate(messages):
            if message["role"] not in ("assistant", "tool") and message["content"].strip() not in texts[0]:
                text = f"the chat template drops the text of message {number}, role `{message['role']}`"
                raise RequestError(400, text, param=f"messages.{number}")
        return texts[0]


def _parse_or_text(tokenizer: PreTrainedTokenizerBase) -> Callable[..., dict[str, Any]]:
    """Wrap the tokenizer's `parse_response` so that an answer which it cannot parse becomes plain text, as in vLLM.

    Such an answer has a tool call that is cut by `max_tokens` or is not valid JSON; transformers 5.23 raises an error
    for it, except in streams (cli/serving/utils.py:545).
    """
    parse = _PARSING.attribute(tokenizer, "parse_response")

    def parse_or_text(ids: Any, *given: Any, **named: Any) -> dict[str, Any]:  # noqa: ANN401 - of transformers
        try:
            return dict(parse(ids, *given, **named))
        except (ValueError, RuntimeError):
            return {"content": tokenizer.decode(ids, skip_special_tokens=True)}

    return parse_or_text


def _within_limits(tokenizer: PreTrainedTokenizerBase) -> Callable[..., Any]:
    """Wrap the tokenizer's `apply_chat_template` with limits of time and memory, since a template may be hostile."""
    render = tokenizer.apply_chat_template

    @wraps(render)
    def render_within_limits(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - of transformers
        with TemplateLimits(str(tokenizer.chat_template)):
            return render(*given, **named)

    return render_within_limits


@dataclass(frozen=True, eq=False)
class AnswerRoute:
    """HTTP route that answers one kind of request; all routes share one queue."""

    kind: type[AnswerRequest]
    handler: Any
    served: ServedModel
    queue: RequestQueue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        try:
            self.queue.check_room()
            request = parse_request(self.kind, await self._read(Request(scope, receive)))
            if request.model != self.served.name:
                raise self.served.not_found(request.model)
            self._check_bias(request)

            async def answer() -> None:
                # A prompt is tokenised when its turn in the queue comes, so that long ones are tokenised one at a time.
                body = await self._body(request)
                response = await self.handler.handle_request(body, str(uuid.uuid4()))
                await _finish_answer(response, body["stop"])(scope, _never, send)

            async def disconnected() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass

            await self.queue.run(answer, disconnected)
        except ClientDisconnect:
            return
        except RequestError as refused:
            await refused.response()(scope, receive, send)

    async def _body(self, request: AnswerRequest) -> dict[str, Any]:
        """Body of the request as transformers expects it, with `max_tokens` and `stop` filled in."""
        text, has_specials = self.served.prompt_text(request), isinstance(request, ChatRequest)
        length = await asyncio.to_thread(self.served.prompt_tokens, text, add_special_tokens=not has_specials)
        stops = request.stop or self.served.model.generation_config.stop_strings or []
        body = request.body() | {"model": self.served.name, "max_tokens": self._max_tokens(request, length)}
        body["stop"] = [stops] if isinstance(stops, str) else stops
        return ({"temperature": 0} if self.served.is_greedy else {}) | body

    async def _read(self, request: Request) -> object:
        raw, most = bytearray(), _BODY_BYTES + _BYTES_PER_TOKEN * (self.served.context or 0)
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > most:
                raise RequestError(413, f"the body has more than {most} bytes", code="context_length_exceeded")
        try:
            body = json.loads(raw)
            # Lone surrogates (`"\\ud800"`) are valid JSON, but no tokenizer accepts them.
            json.dumps(body, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as broken:
            raise RequestError(400, f"the body is not valid JSON, or has a lone surrogate: {broken}") from broken
        return body

    def _check_bias(self, request: AnswerRequest) -> None:
        size = int(self.served.model.config.get_text_config().vocab_size)
        beyond = [token for token in getattr(request, "logit_bias", {}) if int(token) >= size]
        if beyond:
            raise RequestError(400, f"token {beyond[0]} is not in the vocabulary of {size}", param="logit_bias")

    def _max_tokens(self, request: AnswerRequest, prompt: int) -> int:
        if not prompt:
            raise RequestError(400, "the prompt has no tokens", param="prompt")
        context, requested = self.served.context, request.max_new_tokens
        if context is not None and prompt + (requested or 1) > context:
            text = f"this model's maximum context length is {context} tokens; the request has {prompt} tokens of the "
            text += f"prompt and {requested} of the answer" if requested else "prompt"
            param = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise RequestError(400, text, param=param, code="context_length_exceeded")
        limit = requested or self.served.model.generation_config.max_new_tokens or MAX_NEW_TOKENS
        return limit if context is None else min(limit, context - prompt)


def _finish_answer(response: Response, stops: Sequence[str]) -> Response:
    """Change a response to OpenAI's form: a stream gets its end mark, and a complete text is cut before the first stop
    text. The text of a stream was already cut while it was generated.
    """
    if isinstance(response, StreamingResponse):
        response.body_iterator = _with_end(response.body_iterator)
    if not stops or not isinstance(response, JSONResponse):
        return response
    answer = json.loads(bytes(response.body))
    for part in (answer["choices"][0], answer["choices"][0].get("message", {})):
        for name in part.keys() & {"text", "content", "reasoning_content"}:
            part[name] = part[name][: stop_position(part[name], stops)]
    return JSONResponse(answer)


async def _with_end(pieces: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    """Yield the pieces of a stream, then OpenAI's end mark, which transformers 5.23 leaves out."""
    assert isinstance(pieces, AsyncGenerator)
    # If this generator is closed, it closes `pieces`, so transformers ends the generation
    # (cli/serving/chat_completion.py:278).
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece
    yield "data: [DONE]\n\n"


async def _never() -> Message:
    """Wait forever. Handlers get this as `receive`, because `RequestQueue` already reads the client's messages."""
    return await asyncio.get_running_loop().create_future()


async def _error_response(request: Request, error: Exception) -> JSONResponse:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = error.detail if isinstance(error, HTTPException) else repr(error)
    return RequestError(status, f"{request.method} {request.url.path}: {text}").response()


class ApiKeyCheck:
    """Refuses requests without the API key; only `/health` needs none."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request with the API key to the application; refuse others."""
        if scope["type"] == "http" and scope["path"] != "/health":
            given = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(given, self._expected):
                wrong = RequestError(401, "the API key is missing or wrong", code="invalid_api_key")
                return await wrong.response()(scope, receive, send)
        return await self._app(scope, receive, send)


def make_app(folder: Path, limits: QueueLimits, *, device: str = "cpu", api_key: str = "") -> Starlette:
    """Load the model of `folder` on `device` (`auto`: all GPUs), and return the application that serves it.

    If `api_key` is not empty, requests need it.
    """
    served = ServedModel(folder, device)
    stopper = GenerationStopper(served.model)
    state = AnswerState(stopper)
    queue = RequestQueue(limits, stopper, lambda: state.manager.async_submit(lambda: None))
    entry = {"id": served.name, "object": "model", "created": 0, "owned_by": "ds_finetune"}

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [entry]})

    async def model(request: Request) -> JSONResponse:
        if request.path_params["name"] != served.name:
            return served.not_found(request.path_params["name"]).response()
        return JSONResponse(entry)

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    chat = AnswerRoute(ChatRequest, ChatCompletionHandler(served, state), served, queue)
    plain = AnswerRoute(CompletionRequest, CompletionHandler(served, state), served, queue)
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", plain, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
    ]
    errors = {HTTPException: _error_response, Exception: _error_response}
    checks = [Middleware(ApiKeyCheck, key=api_key)] if api_key else []
    app = Starlette(routes=routes, exception_handlers=errors, middleware=checks)
    app.state.queue = queue
    return app


class AnsweringServer(uvicorn.Server):
    """Server that, after a signal, waits until its current answer ends and refuses other requests (status 503)."""

    def __init__(self, config: uvicorn.Config, queue: RequestQueue) -> None:
        super().__init__(config)
        self._queue = queue

    async def on_tick(self, counter: int) -> bool:
        """Whether the server ends now. uvicorn calls this ten times a second."""
        if not await super().on_tick(counter):
            return False
        self._queue.close()
        return self._queue.is_idle or self.force_exit


def main() -> None:
    """Serve the model in a folder until a signal arrives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--queue", type=int, required=True)
    parser.add_argument("--request-seconds", type=float, required=True)
    parser.add_argument("--allow-host", action="append", default=[])
    arguments = parser.parse_args()
    limits = QueueLimits(arguments.queue, arguments.request_seconds)
    app = make_app(arguments.folder, limits, device=arguments.device, api_key=os.environ.get(API_KEY, ""))
    config = uvicorn.Config(
        HostCheck(app, HostRules(arguments.host, allowed=tuple(arguments.allow_host))),
        host=arguments.host,
        port=arguments.port,
        http=BoundedProtocol,
        ws="none",
        log_level="info",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    with suppress(KeyboardInterrupt):
        AnsweringServer(config, app.state.queue).run()


if __name__ == "__main__":
    main()
