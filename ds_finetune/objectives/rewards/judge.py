"""Runs a generated program in one process and its tests in another, so that the program cannot read or fake the tests.

programs.py starts this module, which imports no other module of the package. It forks the program's process before it
reads the tests. In the tests' process, the names that the program defines are proxies. A call of a proxy sends its
arguments to the program's process, and returns data of built-in types, or a handle of an object there. Results are
compared in the tests' process, so that a program passes only with the right values.
"""

import ast
import builtins
import ctypes
import importlib
import io
import operator
import os
import pickle
import pickletools
import resource
import struct
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

_PLAIN = (bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset)
_VALUES: Mapping[str, Callable[[Any], tuple[Any, ...]]] = {
    "builtins.complex": lambda value: (value.real, value.imag),
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "collections.Counter": lambda value: (dict(value),),
    "collections.OrderedDict": lambda value: (list(value.items()),),
    "collections.defaultdict": lambda value: (value.default_factory, dict(value)),
    "collections.deque": lambda value: (list(value), value.maxlen),
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "numpy.ndarray": lambda value: (value.tolist(), value.dtype.str),
    **{f"datetime.{name}": lambda value: value.__reduce__()[1] for name in ("date", "datetime", "time", "timedelta")},
}
"""For each type name, a function that returns the constructor arguments with which an object of this type is sent."""
_FUNCTIONS = (types.FunctionType, types.MethodType, types.GeneratorType)
_HEADER = struct.Struct("=cQ")
"""Header of a message: its kind (`?` request or `!` reply) and its number."""
_MOST_BYTES = 2**26
_FORWARDED = ["getitem", "setitem", "delitem", "len", "iter", "next", "bool", "str", "repr", "float", "int", "round"]
_FORWARDED += ["abs", "neg", "index", "reversed", "enter", "exit", "hash", "call", "setattr"]
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_ORDER = ("lt", "le", "gt", "ge")
_DIFFERENCES = ("add", "sub", "mod", "xor", *_ORDER)
"""Names of operators whose result shows whether a program's object equals the expected value, e.g. a difference of 0.
A class of the program could overload them to pass tests, so such results are marked."""
_TO_NUMBERS = ("abs", "bool", "float", "index", "int", "round")


class Proxy:
    """Handle of an object that lives in the other process; operations on the handle are run there."""

    # Without a `__dict__`, a pickle from the program cannot add attributes to a proxy.
    __slots__ = ("_asks", "_is_difference", "_number")

    def __init__(self, asks: Callable[..., Any], number: int) -> None:
        object.__setattr__(self, "_asks", asks)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_is_difference", False)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the program has
        # Other dunder attributes, such as `__array_interface__`, are refused, because libraries act on them.
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return self._asks("getattr", self, name)

    def __eq__(self, other: object) -> bool:
        """Compare the object's data here, in the tests' process. Only two of the program's objects use its `__eq__`."""
        if isinstance(other, Proxy):
            return other is self or self._asks("eq", self, other) is True
        data = self._asks("data", self)
        return not isinstance(data, Proxy) and bool(data == other)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Proxy) and bool(self._asks("isinstance", instance, self))


def _forwarded(name: str) -> Callable[..., Any]:
    def forward(self: Proxy, *given: Any, **named: Any) -> Any:  # noqa: ANN401
        result = _marked(self._asks(name, self, *given, **named), self._is_difference)
        if self._is_difference and name in _TO_NUMBERS and not isinstance(result, Proxy):
            # Otherwise a program would pass `abs(f(3) - 3.5) < 1e-6` with an object whose differences are always 0.
            raise TypeError(f"{name}() of a difference from an object")
        return result

    return forward


def _marked(result: Any, is_difference: bool) -> Any:  # noqa: ANN401
    if is_difference and isinstance(result, Proxy):
        object.__setattr__(result, "_is_difference", True)
    return result


def _operator(name: str, is_reflected: bool) -> Callable[[Proxy, Any], Any]:
    """Make a binary operator for proxies.

    If the other operand is data of the test, the proxy's object is first converted to data, so that the operation runs
    in the tests' process. If the object has no such form, the program's process runs the operation, and the result must
    be a proxy.
    """

    def operate(self: Proxy, other: Any) -> Any:  # noqa: ANN401
        if isinstance(other, Proxy):
            return self._asks(name, self, other)
        data = self._asks("data", self)
        if not isinstance(data, Proxy):
            return _OPERATIONS[name](*((other, data) if is_reflected else (data, other)))
        result = self._asks(name, *((other, self) if is_reflected else (self, other)))
        result = _marked(result, self._is_difference or name in _DIFFERENCES)
        return result if isinstance(result, Proxy) else NotImplemented

    return operate


def _data(value: Any) -> Any:  # noqa: ANN401
    kinds: Sequence[Callable[[Any], Any]] = [kind for kind in _PLAIN if isinstance(value, kind)]
    return kinds[0](value) if kinds else value


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, f"{name}_" if name in ("and", "or") else name) for name in _BINARY + _ORDER},
    **{name: getattr(operator, name) for name in ("eq", "getitem", "setitem", "delitem", "neg", "index", "call")},
    **{name: getattr(builtins, name) for name in _FORWARDED if hasattr(builtins, name)},
    "getattr": getattr,
    "isinstance": isinstance,
    "data": _data,
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, *_: type(value).__exit__(value, None, None, None),
}
for _name in _FORWARDED:
    setattr(Proxy, f"__{_name}__", _forwarded(_name))
for _name in _BINARY:
    setattr(Proxy, f"__r{_name}__", _operator(_name, is_reflected=True))
for _name in _BINARY + _ORDER:
    setattr(Proxy, f"__{_name}__", _operator(_name, is_reflected=False))


class _Peer:
    """One end of the pipes between program and tests. Each process answers requests while it waits for a reply."""

    def __init__(self, reads: int, writes: int, say: Callable[[str], object] | None = None) -> None:
        self.reads, self.writes = Connection(reads, writable=False), Connection(writes, readable=False)
        self.say, self.is_judge = say or str, say is not None
        self.held: list[Any] = []
        self._numbers: dict[int, int] = {}
        self.theirs: dict[int, Any] = {}
        self._asked = 0

    def ask(self, operation: str, *given: Any, **named: Any) -> Any:  # noqa: ANN401
        """Result of an operation on an object of the other process. Changes of lists, dictionaries and sets among the
        arguments are applied to the caller's objects too.
        """
        self._asked += 1
        number = self._asked
        try:
            body = self._dumps((operation, given, named))
        except Exception as unsent:
            if not self.is_judge:
                raise
            self.say(f"refused {unsent}")
            self.end()
        self._send(b"?", number, body)
        while (reply := self._receive())[0] == b"?":
            self._answer(*reply[1:])
        # A reply with a wrong number shows that the program has written into the pipe, so its tests fail.
        if reply[:2] != (b"!", number):
            self.end()
        error, value, after, printed = self._loads(reply[2])
        sys.stdout.write(printed)
        for argument, changed in zip((*given, *named.values()), after, strict=True):
            if type(argument) is type(changed) and isinstance(argument, list | bytearray):
                argument[:] = changed
            elif type(argument) is type(changed) and isinstance(argument, dict | set):
                argument.clear()
                argument.update(changed)
            # If a function returned one of its arguments, return the caller's own object instead of a copy.
            value = argument if value is changed and value is not None else value
        if error is not None:
            raise error.__new__(error, *value)
        return value

    def serve(self) -> NoReturn:
        sys.stdout = io.StringIO()
        while (request := self._receive())[0] == b"?":
            self._answer(*request[1:])
        self.end()

    def end(self) -> NoReturn:
        """End this process at once, so that no `except` in a test or program can prevent it."""
        os._exit(1)

    def _answer(self, number: int, body: bytes) -> None:
        given: tuple[Any, ...] = ()
        named: dict[str, Any] = {}
        try:
            operation, given, named = self._loads(body)
            allowed = {name: _OPERATIONS[name] for name in ("call", "iter", "next")} if self.is_judge else _OPERATIONS
            error, value = None, allowed[operation](*given, **named)
        except BaseException as raised:  # noqa: BLE001 - whatever a program raises
            error, value = type(raised), raised.args
        arguments = (*given, *named.values())
        after = [each if type(each) in (list, bytearray, dict, set) else None for each in arguments]
        printed = ""
        if isinstance(sys.stdout, io.StringIO) and not self.is_judge:
            printed, sys.stdout = sys.stdout.getvalue(), io.StringIO()
        try:
            reply = self._dumps((error, value, after, printed))
        except Exception as unsent:  # noqa: BLE001 - whatever an object raises that is sent
            reply = self._dumps((TypeError, (str(unsent),), [None] * len(arguments), ""))
        self._send(b"!", number, reply)

    def _send(self, kind: bytes, number: int, body: bytes) -> None:
        try:
            self.writes.send_bytes(_HEADER.pack(kind, number) + body)
        except OSError:
            self.end()

    def _receive(self) -> tuple[bytes, int, bytes]:
        try:
            message = self.reads.recv_bytes(_MOST_BYTES)
            return *_HEADER.unpack_from(message), message[_HEADER.size :]
        except (EOFError, OSError, struct.error):
            self.end()

    def _dumps(self, value: object) -> bytes:
        file = io.BytesIO()
        _Pickler(self, file).dump(value)
        return file.getvalue()

    def _loads(self, body: bytes) -> Any:  # noqa: ANN401
        if not self.is_judge:
            return _Unpickler(self, io.BytesIO(body)).load()
        try:
            # The pickle instruction BUILD is refused, because it could change a function of the tests.
            if self.held and any(code.name == "BUILD" for code, *_ in pickletools.genops(body)):
                self.end()
            return _DataUnpickler(self, io.BytesIO(body)).load()
        except Exception:  # noqa: BLE001 - an honest program sends none that raises
            self.end()

    def hold(self, value: object) -> int:
        """Keep an object of this process alive, and return the number that is its handle."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.held)
            self.held.append(value)
        return self._numbers[id(value)]


class _Pickler(pickle.Pickler):
    """Pickles plain data, and replaces other objects by handles. The tests' process replaces only functions, the
    program's process all other objects.
    """

    def __init__(self, peer: _Peer, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self._peer = peer

    def persistent_id(self, value: Any) -> Any:  # noqa: ANN401
        kind = type(value)
        if kind in _PLAIN or value is None:
            return None
        if kind is Proxy:
            return "yours", value._number
        is_error = isinstance(value, type) and issubclass(value, BaseException)
        if not self._peer.is_judge:
            return self._error(value) if is_error else self._object(value)
        if is_error and "_number" in vars(value):
            return "yours", vars(value)["_number"]
        is_method = kind is types.BuiltinMethodType and not isinstance(value.__self__, types.ModuleType)
        return ("mine", self._peer.hold(value)) if is_method or isinstance(value, _FUNCTIONS) else None

    def _error(self, value: type[BaseException]) -> tuple[Any, ...]:
        if value.__module__ == "builtins":
            return "builtin", value.__name__
        return "error", self._peer.hold(value), value.__name__, value.__base__

    def _object(self, value: Any) -> tuple[Any, ...]:  # noqa: ANN401
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if name in _VALUES:
            return "value", name, _VALUES[name](value)
        if name.startswith("numpy.") and hasattr(value, "dtype") and type(value.item()) in _PLAIN:
            return "data", value.item()
        return "mine", self._peer.hold(value)


class _Unpickler(pickle.Unpickler):
    """Unpickles requests of the tests in the program's process."""

    def __init__(self, peer: _Peer, file: io.BytesIO) -> None:
        super().__init__(file)
        self._peer = peer

    def persistent_load(self, name: Any) -> Any:  # noqa: ANN401
        theirs, ask = self._peer.theirs, self._peer.ask
        match name:
            case ("mine", int(number)):
                return theirs.setdefault(number, Proxy(ask, number))
            case ("yours", int(number)) if 0 <= number < len(self._peer.held):
                return self._peer.held[number]
            case ("builtin", str(text)) if issubclass(getattr(builtins, text), BaseException):
                return getattr(builtins, text)
            case ("error", int(number), str(text), type() as base) if issubclass(base, BaseException):
                return theirs.setdefault(number, type(text, (base,), {"_number": number}))
            case ("data", data) if type(data) in _PLAIN:
                return data
            case ("value", str(text), tuple(given)) if text in _VALUES:
                module, _, kind = text.replace("ndarray", "array").rpartition(".")
                return getattr(importlib.import_module(module), kind)(*given)
        raise pickle.UnpicklingError(str(name))


class _DataUnpickler(_Unpickler):
    """Unpickles what a program sends. Only data of built-in types and what persistent_load returns are allowed."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name}")


def _defined(peer: _Peer, names: set[str]) -> dict[str, Any]:
    """Objects of the program by name. Only requested names count, so that a forged reply cannot replace `abs`."""
    reply = peer.ask("names", sorted(names))
    return {name: reply[name] for name in names & reply.keys()} if type(reply) is dict else {}


def _judge(peer: _Peer, tests: Sequence[str]) -> None:
    parsed: dict[int, ast.Module] = {}
    for number, test in enumerate(tests):
        with suppress(SyntaxError, ValueError):
            parsed[number] = ast.parse(test, "test.py")
    nodes = [node for test in parsed.values() for node in ast.walk(test)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    read = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    modules: dict[str, Any] = {}
    # Modules whose attributes the tests read are imported here, even if only the program imports them.
    for name in read & (sys.stdlib_module_names | {"np", "numpy"}):
        with suppress(ImportError):
            modules[name] = importlib.import_module({"np": "numpy"}.get(name, name))
    builtin_names = names & vars(builtins).keys()
    defined = _defined(peer, names - builtin_names - modules.keys())
    if not defined and len(builtin_names) == 1:
        defined = _defined(peer, builtin_names)
    scope = {"__name__": "__main__", **modules, **defined}
    for number, tree in parsed.items():
        try:
            exec(compile(tree, "test.py", "exec"), scope)
        except BaseException:  # noqa: BLE001 - whatever a test raises
            continue
        peer.say(str(number))


def _run(peer: _Peer, folder: str) -> None:
    """Run the generated program to its end, and then, if there are tests, call its functions as the tests ask."""
    program, limits, is_tested = peer.reads.recv()
    for number, (name, flags) in enumerate((("in", os.O_RDONLY), ("out", os.O_WRONLY | os.O_CREAT))):
        os.dup2(os.open(f"{folder}/{name}", flags, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    libc = ctypes.CDLL(None)
    # The program gets a network namespace without interfaces, as by `unshare --net`. Users other than root need a user
    # namespace for it. If neither is allowed, the program can use the network of this machine.
    libc.unshare(0x40000000 | (0x10000000 if os.geteuid() else 0))
    # Capabilities are dropped, because with them root could read the memory of the other process.
    libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))
    for name, most in limits.items():
        hard = resource.getrlimit(getattr(resource, name))[1]
        most = most if hard < 0 else min(most, hard)
        resource.setrlimit(getattr(resource, name), (most, most))
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "answer.py", "exec"), scope)
    if is_tested:
        _OPERATIONS["names"] = lambda names: {name: scope[name] for name in names if name in scope}
        peer.serve()


def main(folder: str) -> None:
    """Run a program and its tests, read from standard input. The numbers of passed tests go to standard output."""
    # This file's folder is removed from the import path, so that the program cannot import from it.
    sys.path.pop()
    # PR_SET_DUMPABLE of prctl(2) is cleared, so that no other process of this user reads or writes the memory and files
    # of this process.
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    report = os.dup(1)
    os.write(report, b"begins\n")
    (requests, sends_requests), (results, sends_results) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        for ours in (sends_requests, results, report):
            os.close(ours)
        _run(_Peer(requests, sends_results), folder)
        return
    for theirs in (requests, sends_results):
        os.close(theirs)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    program, tests, limits = pickle.load(sys.stdin.buffer)
    peer = _Peer(results, sends_requests, lambda line: os.write(report, f"{line}\n".encode()))
    with suppress(BrokenPipeError):
        peer.writes.send((program, limits, bool(tests)))
    if tests:
        _judge(peer, tests)
    elif os.waitpid(pid, 0)[1] == 0:
        peer.say("0")
    peer.end()
