"""Checks requests of OpenAI's API; unsupported requests are refused with OpenAI's error object."""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.responses import JSONResponse

R = TypeVar("R", bound="AnswerRequest")
MIN_TEMP = 0.01
"""Smallest temperature above 0; logits divided by a smaller one would overflow."""


class RequestError(Exception):
    """A request is refused with an HTTP status and OpenAI's error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 429 else "server_error"
        self.error = {"message": message, "type": kind, "param": param, "code": code}

    def response(self) -> JSONResponse:
        """HTTP response that reports the refused request."""
        return JSONResponse({"error": self.error}, status_code=self.status)


def _joined_text(value: object) -> object:
    """Join a list of text parts by newlines, as vLLM does. Other values are returned for pydantic to check."""
    if not isinstance(value, list):
        return value
    if not all(isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text" for part in value):
        raise ValueError("this server accepts only text: each part has to be {'type': 'text', 'text': ...}")
    return "\n".join(str(part["text"]) for part in value)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        """Remove keys whose value is null, which means absent. OpenAI's client sends such keys in repeated messages."""
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


class _Function(_Strict):
    name: str
    arguments: str


class _ToolCall(_Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


class _Message(_Strict):
    role: Annotated[str, Field(min_length=1)]
    content: Annotated[str, BeforeValidator(_joined_text)] = ""
    tool_calls: list[_ToolCall] = []
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_one_content(self) -> Self:
        # A message with text and tool calls is refused: transformers 5.23 drops such text (cli/serving/utils.py:1237).
        if self.tool_calls and self.content:
            raise ValueError("a message with both text and tool_calls is not supported: its text would be dropped")
        return self


class _TextFormat(_Strict):
    type: Literal["text"]


class _StreamOptions(_Strict):
    include_usage: bool = True


_StopText = Annotated[str, Field(min_length=1)]
_Zero = Annotated[float, Field(ge=0, le=0)]


class AnswerRequest(_Strict):
    """Parameters of both chat and plain completions. Unsupported parameters must have their neutral value."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    user: str | None = None
    n: Literal[1] = 1
    presence_penalty: _Zero = 0
    # A frequency penalty is refused, because transformers 5.23 passes it on as a repetition penalty, which has another
    # formula (cli/serving/chat_completion.py:355).
    frequency_penalty: _Zero = 0
    stop: Annotated[list[_StopText], BeforeValidator(_as_list), Field(max_length=4)] = []

    @model_validator(mode="after")
    def _is_computable(self) -> Self:
        if self.temperature is not None and 0 < self.temperature < MIN_TEMP:
            raise ValueError(
                f"temperature {self.temperature} is not supported: give 0 for greedy answers, or at least {MIN_TEMP}"
            )
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum number of tokens of the answer; None where the request does not limit them."""
        return self.max_tokens

    def body(self) -> dict[str, Any]:
        """Parameters of the request that are passed to transformers."""
        return self.model_dump(include={"temperature", "top_p", "seed", "stream"}, exclude_none=True)


class ChatRequest(AnswerRequest):
    """Request to /v1/chat/completions, the chat API."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: Literal[True] = True
    chat_template_kwargs: dict[str, Any] = {}
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] = {}
    logprobs: Literal[False] = False
    top_logprobs: Annotated[int, Field(ge=0, le=0)] = 0
    response_format: _TextFormat | None = None
    store: Literal[False] = False

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError(
                f"max_tokens {self.max_tokens} and max_completion_tokens {self.max_completion_tokens} differ: give one"
            )
        if self.tool_choice == "none" and self.tools:
            raise ValueError("tool_choice `none` is not supported: leave `tools` out")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum number of tokens of the answer, from `max_completion_tokens` or the older `max_tokens`."""
        return self.max_completion_tokens or self.max_tokens

    def body(self) -> dict[str, Any]:
        """Parameters of the chat request that are passed to transformers."""
        names = ("tools", "chat_template_kwargs", "logit_bias")
        settings = {name: value for name in names if (value := getattr(self, name))}
        return super().body() | {"messages": self.conversation()} | settings

    def conversation(self) -> list[dict[str, Any]]:
        """Messages of the chat request in the form that a chat template expects."""
        dumped = (message.model_dump(exclude_none=True) for message in self.messages)
        return [{key: value for key, value in message.items() if key != "tool_calls" or value} for message in dumped]


class CompletionRequest(AnswerRequest):
    """Request to /v1/completions, the API for plain prompts."""

    prompt: Annotated[str, Field(min_length=1)]
    echo: Literal[False] = False
    best_of: Literal[1] = 1

    def body(self) -> dict[str, Any]:
        """Parameters of the completion request for transformers, without neutral values."""
        return super().body() | {"prompt": self.prompt}


def parse_request(kind: type[R], body: object) -> R:
    """Parse the request in `body`; RequestError (400) names the first parameter that is wrong or not supported."""
    try:
        return kind.model_validate(body)
    except ValidationError as invalid:
        error = invalid.errors()[0]
    name = ".".join(map(str, error["loc"])) or None
    if error["type"] == "extra_forbidden":
        raise RequestError(
            400, f"`{name}` is not supported by this server; leave it out, or serve with --engine vllm", param=name
        )
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing" or name is None:
        raise RequestError(400, f"`{name}` is missing" if name else message, param=name)
    raise RequestError(400, f"`{name}` is {error['input']!r:.200}: {message}", param=name)
