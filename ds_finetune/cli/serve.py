"""The commands `ds-finetune ask`, `chat` and `serve`, which generate answers with an exported folder."""

import io
import sys
from pathlib import Path

from ds_finetune.cli.arguments import (
    Arguments,
    Commands,
    add_allowed_hosts,
    add_command,
    exported_folder,
    port,
    positive,
)
from ds_finetune.console.tables import OUT, show_line, show_piece
from ds_finetune.export.formats import ENGINES


def add_commands(commands: Commands) -> None:
    """Add the commands `ask`, `chat` and `serve` to the program."""
    text = "complete prompts, or classify texts, with an exported folder"
    ask = add_command(commands, "ask", text, _ask)
    ask.add_argument("folder", metavar="OUT", help="an exported folder, or a run")
    ask.add_argument("prompts", metavar="TEXT", nargs="+", help="prompts, or texts to classify")
    ask.add_argument("--max-new-tokens", type=positive, default=128, help="maximum tokens per answer (default 128)")
    chat = add_command(commands, "chat", "talk to an exported folder in the terminal", _chat)
    chat.add_argument("folder", metavar="OUT", help="an exported folder, or a run")
    chat.add_argument("--max-new-tokens", type=positive, default=512, help="maximum tokens per answer (default 512)")
    serve = add_command(commands, "serve", "serve an exported folder through an OpenAI-compatible API", _serve)
    serve.add_argument("folder", metavar="OUT", help="an exported folder, or a run")
    text = "program that runs the model (default auto: chosen by the folder and the GPU)"
    serve.add_argument("--engine", choices=("auto", *ENGINES), default="auto", help=text)
    text = "address to listen on (default 127.0.0.1: only this machine)"
    serve.add_argument("--host", default="127.0.0.1", help=text)
    text = "listen for other machines without DS_FINETUNE_API_KEY, e.g. behind a proxy that asks for a key"
    serve.add_argument("--no-api-key", action="store_true", help=text)
    serve.add_argument("--port", type=port, default=8000, help="port to listen on (default 8000)")
    serve.add_argument("--queue", type=positive, help="transformers and onnx: maximum requests that wait (default 16)")
    text = "transformers and onnx: maximum seconds of a request (default 600)"
    serve.add_argument("--request-seconds", type=float, help=text)
    serve.add_argument("--ready-seconds", type=float, default=1800, help="maximum seconds of loading (default 1800)")
    text = "vllm: folder of an adapter, or of a run with one, which requests name as their model"
    serve.add_argument("--adapter", metavar="FOLDER", help=text)
    add_allowed_hosts(serve)


def _ask(arguments: Arguments) -> None:
    folder = exported_folder(arguments.folder)
    from ds_finetune.export.load import holds_classifier
    from ds_finetune.serving.in_process import ask, classify

    if holds_classifier(folder):
        for text, scores in zip(arguments.prompts, classify(folder, arguments.prompts), strict=True):
            ranked = sorted(scores.items(), key=lambda entry: -entry[1])
            OUT.print(f"> {text}\n{', '.join(f'{name} {score:.4f}' for name, score in ranked)}", markup=False)
        return
    answers = ask(folder, arguments.prompts, max_new_tokens=arguments.max_new_tokens)
    for prompt, answer in zip(arguments.prompts, answers, strict=True):
        OUT.print(f"> {prompt}\n{answer}", markup=False)


def _chat(arguments: Arguments) -> None:
    folder = exported_folder(arguments.folder)
    from ds_finetune.serving.in_process import EXIT_WORD, ChatSession, run_chat

    session = ChatSession(folder, max_new_tokens=arguments.max_new_tokens)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Invalid bytes of the input reach the chat session as surrogates, which the session refuses.
        sys.stdin.reconfigure(errors="surrogateescape")
    show_line(f"`{EXIT_WORD}` ends the chat")
    run_chat(session, read=lambda: OUT.input("> "), write=show_piece)


def _serve(arguments: Arguments) -> None:
    folder = exported_folder(arguments.folder)
    from ds_finetune.serving.serve import Address, ServeOptions, serve

    address = Address(arguments.host, arguments.port)
    limits = (arguments.queue, arguments.request_seconds, tuple(arguments.allow_host), arguments.no_api_key)
    adapter = None if arguments.adapter is None else Path(arguments.adapter)
    options = ServeOptions(arguments.engine, arguments.ready_seconds, *limits, adapter=adapter)
    serve(folder, address, options, show=show_line)
