"""Reward `code`: what a program cannot forge, and what tests may do with the objects of an honest one."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.objectives.rewards.answers import RewardFaultError
from ds_finetune.objectives.rewards.worker import load_scorer
from tests.objectives.rewards.scoring import answer_of, section_of

TESTS = ["assert fib(1) == 1", "assert fib(10) == 55"]


def score(program: str, tests: Any, **options: Any) -> float | None:
    section = section_of({"reward": "code", "partial": True, "timeout": 30, **options})
    return load_scorer(section.settings)(answer_of(f"```python\n{program}\n```", {"tests": tests})).score


ALWAYS = """
class Always{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def _same(self, *others): return self
    __hash__ = lambda self: 0
    __contains__ = __lt__ = __gt__ = __le__ = __ge__ = lambda *_: True
    __sub__ = __rsub__ = __abs__ = __add__ = __round__ = lambda *_: 0.0
    __iter__ = lambda self: iter([self])
"""
FORGERIES = {
    "main": "import __main__\nfor name in ('tests', 'task'):\n    setattr(__main__, name, [])\n"
    "say = getattr(__main__, 'say', None)\nif say: [say(n) for n in range(9)]",
    "frames": "import sys\nframe = sys._getframe()\nwhile frame:\n    for value in list(frame.f_globals.values()) + "
    "list(frame.f_locals.values()):\n        if callable(value) and getattr(value, '__name__', '') == 'say':\n"
    "            [value(n) for n in range(9)]\n        if isinstance(value, list): value.clear()\n    frame = frame.f_back",
    "tests found by gc": "import gc\nfor each in gc.get_objects():\n    if isinstance(each, dict) and each.get('key'):\n"
    "        import os\n        for fd in range(3, 64):\n            for n in range(9):\n                try: os.write(fd, "
    "f\"{each['key']} {n}\\n\".encode())\n                except OSError: pass\n"
    "    if isinstance(each, list) and any(isinstance(x, str) and 'assert' in x for x in each): each[:] = ['pass'] * len(each)",
    "every descriptor": "import os\nfor fd in range(64):\n    for text in (b'begins\\n', b'0\\n1\\n', b'!' + bytes(16)):\n"
    "        try: os.write(fd, text)\n        except OSError: pass\ndef fib(n): return 0",
    "descriptors of all processes": "import os, glob\nfor path in glob.glob('/proc/[0-9]*/fd/*'):\n"
    "    try:\n        if os.readlink(path).startswith('pipe:'):\n"
    "            os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), b'0\\n1\\n')\n    except OSError: pass\n"
    "def fib(n): return 0",
    "memory of the parent": "import os\ndef fib(n):\n    with open(f'/proc/{os.getppid()}/mem', 'r+b') as memory, "
    "open(f'/proc/{os.getppid()}/maps') as maps:\n        for line in maps:\n"
    "            first, last = (int(x, 16) for x in line.split()[0].split('-'))\n            memory.seek(first)\n"
    "            text = memory.read(last - first)\n            if b'fib(10) == ' in text:\n"
    "                return int(text.partition(b'fib(%d) == ' % n)[2][:2])",
    "builtins": "import builtins\nreal = compile\nbuiltins.compile = lambda code, name, *rest: real('pass', name, *rest)\n"
    "builtins.exec = builtins.print = lambda *_: None\nbuiltins.AssertionError = None",
    "always equal": ALWAYS.format(base="") + "fib = lambda n: Always()",
    "always equal int": ALWAYS.format(base="(int)") + "fib = lambda n: Always()",
    "equal class": "class Meta(type):\n    __eq__ = lambda *_: True\n    __hash__ = type.__hash__\n"
    "class fib(metaclass=Meta):\n    def __new__(cls, n): return cls",
    "pickle": "import pickle, builtins, sys\nclass Evil:\n    def __reduce__(self): return eval, ('55',)\n"
    "pickle.Pickler.persistent_id = None\n"
    "for module in list(sys.modules.values()):\n    for name in ('_Pickler',):\n"
    "        if hasattr(module, name): getattr(module, name).persistent_id = lambda self, value: None\n"
    "def fib(n): return Evil()",
    "leaves": "import sys\ndef fib(n): sys.exit(0)",
    "ends": "import os\nos._exit(0)",
    "ends later": "import os\ndef fib(n): os._exit(0)",
    "two processes answer": "import os\nos.fork()\ndef fib(n): return 0",
    "exception that is everything": "class Fine(BaseException): pass\ndef fib(n): raise Fine",
    "stops": "def fib(n): raise StopIteration(55)",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_program_cannot_forge_its_tests(name: str) -> None:
    assert score(FORGERIES[name], TESTS, timeout=5) == 0


VALUES = [
    "assert f(3) == 3.5",
    "assert 3.5 == f(3)",
    "assert not f(3) != 3.5",
    "assert f(3) in (3.5, 4)",
    "assert 3.5 in f(3)",
    "assert list(f(3)) == [3.5]",
    "assert set(f(3)) == {3.5}",
    "assert {1: f(3)} == {1: 3.5}",
    "assert abs(f(3) - 3.5) < 1e-6",
    "assert abs(3.5 - f(3)) < 1e-6",
    "assert f(3) > 3.4 and f(3) < 3.6",
    "assert 3.4 < f(3) < 3.6",
    "assert round(f(3), 1) == 3.5",
    "assert math.isclose(f(3), 3.5)",
    "assert f(3) is True",
    "assert isinstance(f(3), float)",
    "assert type(f(3)) == float and f(3) == 3.5",
]


@pytest.mark.parametrize("base", ["", "(int)", "(str)", "(list)"])
def test_an_object_equals_no_value_that_it_is_not(base: str) -> None:
    program = ALWAYS.format(base=base) + "f = lambda n: Always()\ndef abs(x): return 0\ndef round(*_): return 3.5\n"
    program += (
        "class math:\n    isclose = lambda *_: True\nset = list = sorted = lambda x: x\nisinstance = lambda *_: True\n"
    )
    assert score(program, VALUES) == 0


DIFFERENCES = [
    "assert abs(f(3) - 3.5) < 1e-6",
    "assert abs(3.5 - f(3)) < 1e-6",
    "assert abs(-(f(3) + -3.5)) < 1e-6",
    "assert abs((f(3) - 3.5) / 3.5) < 1e-6",
    "assert round(f(3) - 3.5, 3) == 0",
    "assert not f(3) % 2",
    "assert int(f(3) - 3) == 0",
    "import math\nassert math.floor(f(3) - 3) == 0",
]


def test_differences_from_an_object_are_no_numbers() -> None:
    methods = "add sub rsub neg truediv mod xor"
    program = "class Zero:\n    def _same(self, *others): return self\n    __abs__ = __float__ = lambda self: 0.0\n"
    program += "    __round__ = __int__ = lambda *_: 0\n    __bool__ = lambda self: False\n"
    program += "".join(f"    __{name}__ = _same\n" for name in methods.split()) + "f = lambda n: Zero()"
    assert score(program, DIFFERENCES) == 0


LOOKUP = """
import sys
judge = sys.modules["judge"]
class Forged(dict):
    def __setitem__(self, key, value):
        if key == "names":
            value = lambda names: {{**{{name: lambda *a: 0 for name in names}}, **{extra}}}
        super().__setitem__(key, value)
judge._OPERATIONS = Forged(judge._OPERATIONS)
class module:
    isclose = lambda *_: True
"""
LOOKUPS = [
    ("{'range': lambda *_: []}", "def check(f):\n    for x in range(20): assert f(x) == x + 1\ncheck(g)"),
    ("{'all': lambda *_: True}", "assert all(f(n) == n + 1 for n in range(30))"),
    ("{'math': module}", "assert math.isclose(f(3), 3.5)"),
    ("{'__builtins__': {'abs': lambda *_: 0}}", "assert abs(f(3) - 3.5) < 1e-6"),
]


@pytest.mark.parametrize(("extra", "tests"), LOOKUPS)
def test_a_program_defines_no_name_that_the_tests_did_not_look_up(extra: str, tests: str) -> None:
    assert score(LOOKUP.format(extra=extra), tests) == 0


def test_the_order_of_an_object_and_a_number_is_no_object() -> None:
    program = (
        "class True_:\n    def _same(self, *_): return self\n    __lt__ = __gt__ = __le__ = __ge__ = __mul__ = _same\n"
    )
    assert score(program + "f = lambda n: True_()", ["assert 3.4 < f(3) < 3.6", "assert f(3) * 2 > 6.9"]) == 0


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("def check(f):\n    assert f(2) == 3", "asserts nothing and calls no function"),
        (["import math", "class TestAdd:\n    def test_add(self): assert add(1, 2) == 3"], "calls no function"),
        ("@mark(3)\ndef test_add(): assert add(1, 2) == 3", "calls no function"),
        ("assert f(1) == 1\nprint 'x'", "no Python code: .*line 2"),
        (["assert f(1) == 1", "assert f(2) = 2"], "no Python code"),
    ],
)
def test_tests_that_no_program_or_every_program_would_pass(tests: Any, message: str) -> None:
    with pytest.raises(RewardFaultError, match=message):
        score("def f(x): return x", tests)


HONEST = {
    "vectors": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __sub__(self, y): return V(self.x - y)\n"
        "    def __mul__(self, y): return V(self.x * y)\n    def __abs__(self): return abs(self.x)\n",
        "assert abs(V(-3) * 2) == 6 and (V(5) - 2).x == 3",
    ),
    "exceptions": (
        "def f(n):\n    raise ValueError(f'{n} is bad')",
        "try:\n    f(3)\nexcept ValueError as e:\n    assert str(e) == '3 is bad'\nelse:\n    assert False",
    ),
    "own exceptions": (
        "class A(Exception): pass\nclass B(A): pass\ndef f(): raise B('x', 1)",
        "try:\n    f()\nexcept A as e:\n    assert e.args == ('x', 1)\nelse:\n    raise TypeError",
    ),
    "a raise alone": ("f = 3", "if f != 3: raise ValueError"),
    "floats": ("def f(n): return n / 3", "import math\nassert abs(f(1) - 0.3333333) < 1e-6 and math.isclose(f(3), 1)"),
    "the program's import": ("import math\ndef f(n): return n / 3", "assert math.isclose(f(3), 1)"),
    "containers": (
        "def f(*a, **k): return [a, k, {1, 2}, None, b'x', 10**30, {(1, 2): [3]}, float('inf'), 1j]",
        "assert f(1, x=2) == [(1,), {'x': 2}, {1, 2}, None, b'x', 10**30, {(1, 2): [3]}, float('inf'), 1j]",
    ),
    "generators": (
        "def f(n):\n    for i in range(n): yield i * i",
        "assert list(f(4)) == [0, 1, 4, 9]\nassert sum(f(3)) == 5\ng = f(2)\nassert next(g) == 0 and next(g, 7) == 1 and next(g, 7) == 7",
    ),
    "library types": (
        "from collections import *\nfrom fractions import Fraction\nfrom decimal import Decimal\nfrom datetime import date\ndef f(s): return Counter(s), deque(s), OrderedDict.fromkeys(s), defaultdict(int, a=1), Fraction(1, 3), Decimal('1.5'), date(2020, 2, 3), range(3)",
        "from collections import *\nfrom fractions import Fraction\nfrom decimal import Decimal\nfrom datetime import date\nc, d, o, e, *rest = f('aab')\nassert c == {'a': 2, 'b': 1} and c.most_common(1) == [('a', 2)]\nassert d == deque('aab') and list(o) == ['a', 'b'] and e['z'] == 0\nassert rest == [Fraction(1, 3), Decimal('1.5'), date(2020, 2, 3), range(3)]",
    ),
    "named tuples and enumerations": (
        "from collections import namedtuple\nfrom enum import IntEnum\nP = namedtuple('P', 'x y')\nclass E(IntEnum): A = 4\ndef f(): return P(1, 2), E.A",
        "p, e = f()\nassert p == (1, 2) and p.x == 1 and p[1] == 2 and e == 4 and e + 1 == 5 and e > 3\nassert f() == ((1, 2), 4)",
    ),
    "classes": (
        "class Stack:\n    size = 0\n    def __init__(self, *items): self.items = list(items)\n    def push(self, x):\n        self.items.append(x)\n        return self\n    def __len__(self): return len(self.items)\n    def __getitem__(self, i): return self.items[i]\n    def __eq__(self, other): return self.items == other.items\n    def __add__(self, other): return Stack(*self.items, *other.items)\n    def __mul__(self, n): return Stack(*self.items * n)\n    def __str__(self): return f'<{self.items}>'\n    @staticmethod\n    def of(x): return Stack(x)",
        "s = Stack(1)\nassert s.push(2) is s and len(s) == 2 and s[1] == 2 and s.items == [1, 2]\nassert s == Stack(1, 2) and s != Stack(1) and str(s) == '<[1, 2]>'\nassert s + Stack(3) == Stack(1, 2, 3) and Stack(1) * 2 == Stack(1, 1)\nassert isinstance(s, Stack) and Stack.of(5)[0] == 5 and 2 in s and list(s) == [1, 2]\ns.size = 7\nassert s.size == 7 and Stack.size == 0 and not hasattr(s, 'pop')\nassert [s, Stack()] == [Stack(1, 2), Stack()]",
    ),
    "derived list": (
        "class L(list):\n    def twice(self): return self + self",
        "x = L([1, 2])\nx.append(3)\nassert x == [1, 2, 3] and x.twice() == [1, 2, 3, 1, 2, 3] and len(x) == 3 and x[0] == 1 and sorted(x)[-1] == 3",
    ),
    "changed arguments": (
        "def f(a, d, m):\n    a.sort()\n    d['x'] = 1\n    m[0][0] = 9\ndef g(a): return a",
        "a, d, m = [3, 1, 2], {}, [[1], [2]]\nassert f(a, d, m) is None\nassert (a, d, m) == ([1, 2, 3], {'x': 1}, [[9], [2]])\nassert g(a) is a",
    ),
    "changed arguments by name": (
        "def f(a, d): a.sort(); d.add(1)",
        "a, d = [3, 1], set()\nf(d=d, a=a)\nassert (a, d) == ([1, 3], {1})",
    ),
    "functions of the tests": (
        "def f(g, xs): return [g(x) for x in xs]\ndef h(n): return lambda x: x + n\ndef k(it): return sum(it)",
        "assert f(lambda x: x + 1, [1, 2]) == [2, 3] and f(str, (1, 2)) == ['1', '2'] and h(2)(3) == 5\nassert f(h(1), [1]) == [2] and k(x for x in range(4)) == 6 and k(iter([1, 2])) == 3\nout = []\nf(out.append, [1, 2])\nassert out == [1, 2]\ndef bad(x): raise KeyError(x)\ntry: f(bad, [5])\nexcept KeyError as e: assert e.args == (5,)\nelse: assert False",
    ),
    "a name of Python's": ("def sum(a, b): return a * b", ["assert sum(3, 4) == 12", "assert sum(0, 5) == 0"]),
    "HumanEval": (
        "def add(a, b): return a + b",
        "METADATA = {}\ndef check(candidate):\n    assert candidate(2, 3) == 5\n    for x in range(20): assert candidate(x, 1) == x + 1\ncheck(add)",
    ),
    "printed": (
        "def f(): print('a', 2)",
        "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out): f()\nassert out.getvalue() == 'a 2\\n'",
    ),
    "contexts": (
        "from contextlib import contextmanager\nlog = []\n@contextmanager\ndef f():\n    log.append(1)\n    yield 5\n    log.append(2)\ndef g(): return log",
        "with f() as x: assert x == 5 and g() == [1]\nassert g() == [1, 2]",
    ),
    "the program's numpy": ("import math as np\ndef f(n): return n / 3", "assert np.allclose([f(3)], [1.0])"),
    "shared names": ("x = 3\ndef f(): return x", ["y = f()", "assert y == x == 3"]),
    "many calls": ("def f(n): return n", "assert all(f(n) == n for n in range(3000))"),
}


def test_a_reply_does_not_change_functions_of_the_tests() -> None:
    """Pickle's BUILD would set the default of `same` by a reply of the program's own making."""
    program = (
        "import pickle, sys\nclass Reply:\n    def __init__(self, g): self.g = g\n"
        "def f(g):\n    global real\n    peer = g._asks.__self__\n    real = peer._dumps\n"
        "    def dumps(value):\n        body = real((None, g, [None, None], ''))\n"
        "        state = pickle.dumps((None, {'__defaults__': (True,)}), protocol=5)[2:-1]\n"
        "        state = state[9:] if state[:1] == b'\\x95' else state\n"
        "        at = body.index(b'Q') + 1\n"
        "        return body[:2] + body[11:at] + state + b'b' + body[at:]\n"
        "    peer._dumps = dumps\n    return g"
    )
    tests = "def same(result=None): return result is True\nf(same)\nassert same()"
    assert score(program, tests) == 0


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_pass(name: str) -> None:
    program, tests = HONEST[name]
    assert score(program, tests) == 1


def test_arrays_are_data() -> None:
    pytest.importorskip("numpy")
    program = "import numpy as np\ndef f(): return np.arange(3), np.float64(1.5), np.mean([1, 2]), np.bool_(True)"
    test = (
        "import numpy as np\na, b, c, d = f()\nassert (a == np.array([0, 1, 2])).all() and b == c == 1.5 and d is True"
    )
    assert score(program, test, memory="8GB") == 1


def test_tests_that_give_what_is_no_data_are_an_error() -> None:
    tests = "class Node:\n    value = 3\nassert f(Node()) == 3"
    with pytest.raises(RewardFaultError, match=r"tests that give a program what is no data: .*Node"):
        score("def f(node): return node.value", tests)


@pytest.mark.parametrize("end", ["", "while True: pass", "os._exit(0)", "os.kill(os.getppid(), 9)"])
def test_no_process_of_a_program_is_left(end: str) -> None:
    """Also of those with a session of their own, whose parents have ended."""
    mark = f"left-{os.getpid()}-{time.monotonic_ns()}"
    program = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.setsid()\n"
        f"        os.execv('/bin/sh', ['sh', '-c', 'sleep 1000; : {mark}'])\n    os._exit(0)\ntime.sleep(0.2)\n{end}\n"
        "def fib(n): return 0"
    )
    score(program, TESTS, timeout=2)
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in _text(path)] == []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
