"""Each built-in reward on answers that are right, wrong, and without a result."""

from importlib.util import find_spec
from typing import Any

import pytest

from ds_finetune.objectives.rewards.answers import RewardFaultError
from ds_finetune.objectives.rewards.builtin import BUILTIN
from ds_finetune.objectives.rewards.extractors import last_number
from ds_finetune.objectives.rewards.worker import load_scorer
from tests.objectives.rewards.scoring import answer_of, section_of

FORMULAS = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is an optional package")
THOUGHT = "<think>it is 5, no, 4</think>"
FIBONACCI = "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
ASSERTS = ["assert fib(1) == 1", "assert fib(10) == 55", "assert fib(3) == 2"]
ECHO = {"inputs": ["1 2\n", "5 6\n"], "outputs": ["3", "11\n"]}


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nGood luck!"


def outcome(section: Any, text: str, **record: Any) -> tuple[float | None, bool | None]:
    settings = section_of(section).settings
    found = load_scorer(settings)(answer_of(text, record or {"answer": "4"}))
    return found.score, found.has_result


CASES = [
    # section, record, answer, score, whether there is a result
    ("exact_match", {"answer": "4"}, "4", 1, True),
    ("exact_match", {"answer": "4"}, " 4\n", 1, True),
    ("exact_match", {"answer": "4"}, "four", 0, True),
    ("exact_match", {"answer": 4}, "4", 1, True),
    ("exact_match", {"answer": ["4", "four"]}, "four", 1, True),
    ("exact_match", {"answer": "New\nYork"}, "New  York", 1, True),
    ("exact_match", {"answer": "Paris"}, "paris", 0, True),
    ({"reward": "exact_match", "ignore_case": True}, {"answer": "Paris"}, "PARIS", 1, True),
    ("exact_match", {"answer": "4"}, f"{THOUGHT} 4", 1, True),
    ("exact_match", {"answer": "4"}, f"{THOUGHT}\n<answer>4</answer>", 1, True),
    ("exact_match", {"answer": "4"}, "<think>4", 0, False),
    ("exact_match", {"answer": "4"}, "", 0, False),
    ({"reward": "exact_match", "unparsed": -1.0}, {"answer": "4"}, " \n", -1, False),
    ({"reward": "exact_match", "column": "extra.truth"}, {"extra": {"truth": "yes"}}, "yes", 1, True),
    ("number", {"answer": "4"}, "2 + 2 is 4.", 1, True),
    ("number", {"answer": "4"}, "4 is not right, it is 5", 0, True),
    ("number", {"answer": "4"}, r"\boxed{4}, and not 5", 1, True),
    ("number", {"answer": "4"}, r"first \boxed{4}, then \boxed{5}", 0, True),
    ("number", {"answer": "4"}, r"4, so \boxed{x}", 0, False),
    ("number", {"answer": "4"}, r"\boxed{4", 1, True),
    ("number", {"answer": "... so 1 + 17\n#### 18"}, "$18.00", 1, True),
    ("number", {"answer": 1234}, "1,234", 1, True),
    ("number", {"answer": 0.5}, r"\boxed{\frac{1}{2}}", 1, True),
    ("number", {"answer": "1/3"}, "it is 1/3", 1, True),
    ("number", {"answer": "1/3"}, "it is 2/3", 0, True),
    ("number", {"answer": -7}, "x=-7", 1, True),
    ("number", {"answer": 7}, "from 3-7", 0, False),
    ("number", {"answer": "4"}, "1e999999999999", 0, False),
    ("number", {"answer": "4"}, "1/0", 0, False),
    ("number", {"answer": "4"}, "none", 0, False),
    ("number", {"answer": "4"}, "", 0, False),
    ("number", {"answer": 3.14159}, "3.14", 0, True),
    ({"reward": "number", "tolerance": 0.01}, {"answer": 3.14159}, "3.14", 1, True),
    ({"reward": "number", "unparsed": -0.5}, {"answer": 3}, "three", -0.5, False),
    ("choice", {"answer": "B"}, "B", 1, True),
    ("choice", {"answer": "B"}, "The answer is (B), not A.", 1, True),
    ("choice", {"answer": "B"}, r"\boxed{\text{B}}", 1, True),
    ("choice", {"answer": 1}, "Answer: B", 1, True),
    ("choice", {"answer": "B) Paris"}, "Answer: C", 0, True),
    ("choice", {"answer": "B"}, "no idea", 0, False),
    ({"reward": "regex", "pattern": r"\b4\b"}, {"x": 1}, "it is 4!", 1, None),
    ({"reward": "regex", "pattern": r"\b4\b"}, {"x": 1}, "it is 44", 0, None),
    ({"reward": "regex", "pattern": ".*"}, {"x": 1}, "", 0, None),
    ("format", {"x": 1}, f"{THOUGHT}\n4", 1, None),
    ("format", {"x": 1}, "4", 0, None),
    ("format", {"x": 1}, "<think></think>4", 0, None),
    ("format", {"x": 1}, THOUGHT, 0, None),
    ("format", {"x": 1}, f"4 {THOUGHT} 4", 0, None),
    ("format", {"x": 1}, f"{THOUGHT}{THOUGHT}4", 0, None),
    ("format", {"x": 1}, "", 0, None),
    ({"reward": "format", "answer_tag": True}, {"x": 1}, f"{THOUGHT}<answer>4</answer>", 1, None),
    ({"reward": "format", "answer_tag": True}, {"x": 1}, f"{THOUGHT}4", 0, None),
    ({"reward": "format", "answer_tag": True}, {"x": 1}, f"{THOUGHT}<answer></answer>", 0, None),
    ("json", {"x": 1}, '{"a": [1, 2]}', 1, True),
    ("json", {"x": 1}, '```json\n{"a": 1}\n```', 1, True),
    ("json", {"x": 1}, '{"a": 1', 0, False),
    ("json", {"x": 1}, "NaN", 0, False),
    ("json", {"x": 1}, "[" * 100_000, 0, False),
    ("json", {"x": 1}, "", 0, False),
    ({"reward": "json", "column": "answer"}, {"answer": {"a": 1, "b": 2}}, '{"b": 2, "a": 1}', 1, True),
    ({"reward": "json", "column": "answer"}, {"answer": '{"a": 1}'}, '{"a": 2}', 0, True),
]


@pytest.mark.parametrize(("section", "record", "text", "score", "has_result"), CASES)
def test_scores(section: Any, record: dict[str, Any], text: str, score: float, has_result: bool | None) -> None:
    assert outcome(section, text, **record) == (score, has_result)


@pytest.mark.parametrize(
    ("text", "score", "has_result"),
    [
        (fenced(FIBONACCI), 1, True),
        (fenced("def fib(n):\n    return 1"), 0, True),
        (f"```\n{FIBONACCI}```", 1, True),
        (fenced("def fib(n): return 0") + fenced(FIBONACCI), 1, True),
        (fenced(FIBONACCI) + "\n```\noutput\n```", 1, True),
        (FIBONACCI, 0, False),
        ("", 0, False),
        (fenced(""), 0, False),
        (fenced("import sys\nsys.exit(0)"), 0, True),
        (fenced("import os\nos._exit(0)"), 0, True),
        (fenced("fib = lambda n: 1 / 0"), 0, True),
        (fenced("def fib(n) return n"), 0, True),
    ],
)
def test_programs(text: str, score: float, has_result: bool) -> None:
    assert outcome("code", text, tests=ASSERTS) == (score, has_result)


def test_the_share_of_the_tests_that_pass() -> None:
    section = {"reward": "code", "partial": True}
    assert outcome(section, fenced("def fib(n):\n    return 1"), tests=ASSERTS)[0] == pytest.approx(1 / 3)
    assert outcome("code", fenced("def fib(n):\n    return 1"), tests=ASSERTS)[0] == 0


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("print(sum(map(int, input().split())))", 1),
        ("a = open(0).read().split()\nprint(int(a[0]) + int(a[1]))\nexit()", 1),
        ("print(3)", 0.5),
        ("print(3)\nraise SystemExit(1)", 0),
        ("print(3)\n1 / 0", 0),
    ],
)
def test_programs_that_read_and_print(program: str, score: float) -> None:
    assert outcome({"reward": "code", "partial": True}, fenced(program), tests=ECHO) == (score, True)


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time\ntime.sleep(1e6)",
        "import os\nos.fork()\nwhile True: pass",
        "x = bytearray(2**40)\ndef fib(n): return n",
        "import os\ndef fib(n): return os.environ['HOME']",
        "import urllib.request\ndef fib(n): return urllib.request.urlopen('http://127.0.0.1:1')",
        "open('out', 'wb').write(bytes(2**26))\ndef fib(n): return n",
        "import signal, os\nos.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_programs_that_break_a_limit_score_zero(program: str) -> None:
    section = {"reward": "code", "timeout": 1.5, "memory": "1GB"}
    assert outcome(section, fenced(program), tests="assert fib(1) == 1") == (0, True)


def test_a_program_starts_in_an_empty_folder_and_without_the_environment() -> None:
    program = "import os\nfib = lambda n: (os.listdir(), sorted(os.environ))"
    tests = "assert fib(1)[0] == [], fib(1)\nassert not {'HOME', 'USER'} & set(fib(1)[1])"
    assert outcome("code", fenced(program), tests=tests) == (1, True)


def test_a_program_that_cannot_be_started_is_not_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_finetune.objectives.rewards.programs.sys.executable", "/bin/false")
    with pytest.raises(RewardFaultError, match="could not start Python for a program"):
        outcome("code", fenced(FIBONACCI), tests=ASSERTS)


@FORMULAS
@pytest.mark.parametrize(
    ("reference", "text", "score", "has_result"),
    [
        (r"\frac{1}{2}", r"so \boxed{0.5}", 1, True),
        (r"$\frac{1}{2}$", r"so \boxed{\frac{2}{4}}", 1, True),
        (r"x+1", r"\boxed{1+x}", 1, True),
        (r"x+1", r"\boxed{x+1} and then \boxed{x+2}", 0, True),
        ("4", "the answer is 5", 0, True),
        ("4", "", 0, False),
        ("4", "<think>4", 0, False),
    ],
)
def test_formulas(reference: str, text: str, score: float, has_result: bool) -> None:
    assert outcome("math", text, answer=reference) == (score, has_result)


@pytest.mark.parametrize(
    ("tokens", "score"), [(1, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1), (500, -1)]
)
def test_the_soft_punishment_of_long_answers(tokens: int, score: float) -> None:
    scorer = load_scorer(section_of({"reward": "length", "max_tokens": 100, "soft_tokens": 20}).settings)
    assert scorer(answer_of("x", ids=[7] * tokens)).score == pytest.approx(score)
    hard = load_scorer(section_of({"reward": "length", "max_tokens": 100}).settings)
    assert hard(answer_of("x", ids=[7] * tokens)).score == (-1 if tokens > 100 else 0)


def test_reasoning_that_the_prompt_begins() -> None:
    opened = {"prompt": "<|Assistant|><think>\n"}
    right = answer_of("it is 5, no, 4</think>\n4", **opened)
    unended = answer_of("it is 4", **opened)
    number, form = (load_scorer(section_of(name).settings) for name in ("number", "format"))
    assert [number(each)[:2] for each in (right, unended)] == [(1, True), (0, False)]
    assert [form(each).score for each in (right, unended)] == [1, 0]


def test_every_builtin_has_a_case() -> None:
    tested = {section if isinstance(section, str) else section["reward"] for section, *_ in CASES}
    assert tested | {"length", "math", "code"} == BUILTIN.keys()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10^6", 10**6),
        ("10**6", 10**6),
        (r"$10^{-3}$", 0.001),
        ("2 \\times 10^5", 2 * 10**5),
        ("9 \u00d7 10^3 km", 9 * 10**3),
        ("3 1/2 cups", 3.5),
        ("-3 1/2", -3.5),
        ("3\u00bd", 3.5),
        ("1 \u00bd", 1.5),
        ("We have x = 3\n\u00bd", 0.5),
        (r"\frac12", 0.5),
        (r"\boxed{-\dfrac{3}{4}}", -0.75),
        (r"\boxed{3\frac{1}{2}}", 3.5),
        ("1 000 000", 10**6),
        (r"1\,000\,000", 10**6),
        ("1\u202f234.5", 1234.5),
        ("in 2019 100 people", 100),
        ("2 * 10 = 20", 20),
        ("**72**", 72),
        (r"\boxed{72\text{ apples}}", 72),
        (r"\boxed{x^2}", None),
        ("10^999999999", None),
        ("10\u2076 m\u00b2", 10**6),
        ("1.5 x 10\u207b\u00b2", 0.015),
        (r"\boxed{\frac{1}{-2}}", -0.5),
        (r"\boxed{{1 \over 2}}", 0.5),
        ("5 / 2", 2.5),
        ("1_000", 1000),
        ("1'000'000", 10**6),
        ("-\u20ac5", -5),
        ("2.5 million dollars", 2_500_000),
        ("1.234.567,5", 1234567.5),
        ("1.000.000", 10**6),
        ("version 1.234", 1.234),
        (r"\boxed{2\sqrt{3}}", None),
        (r"\boxed{\frac{3}{4}\pi}", None),
        (r"the side is $\sqrt{2}$", None),
        (r"$\sqrt{16} = 4$", 4),
        (r"$\frac{\sqrt{3}}{2}$", None),
        (r"\frac{2}{3}\pi", None),
        (r"$\frac{\sqrt3}{2}$", None),
        (r"so \frac{x}{4} of the cakes, which leaves 7 cakes", 7),
        (r"Using $\frac{n(n+1)}{2}$ with n of ten gives 55", 55),
        (r"The ratio is \frac{a_{1}}{b} and the total is 5", 5),
        (r"\frac{1,000}{2}", 500),
        ("x = - 5", -5),
        (r"\boxed{- 5}", -5),
        ("\u20135 degrees", -5),
        ("12,34,567 rupees", 1_234_567),
        ("10^" + "9" * 5000, None),
        ("Rs.500", 500),
        ("USD 1,200.50", 1200.5),
        ("the area is 5m2", 5),
        ("3 hundred", 300),
        ("a 5-year-old", 5),
        ("$5/hour", 5),
        ("2 ** 10", 1024),
        ("<b>5</b>", 5),
        ("_5_", 5),
        ("so => 5!", 5),
        ("the solutions are 1, 5", 5),
        ("The answer is\n42", 42),
        ("### Answer\n42", 42),
        ("Step 3:\n$42", 42),
        ("a total of\n42 apples", 42),
        ("Answer:\n> 42", 42),
        ("The answer is <42>", 42),
        (r"\left(42\right)", 42),
        ("See catalog 5", 5),
    ],
)
def test_numbers_as_people_write_them(text: str, value: float | None) -> None:
    number = last_number(text)
    assert (None if number is None else float(number)) == value


@pytest.mark.parametrize(
    "text",
    [
        *(
            "1,5",
            "0,50 \u20ac",
            "(3,14)",
            "1,234,5",
            r"\boxed{(1, 2)}",
            r"\boxed{8 \text{ or } 9}",
            r"\boxed{8 and 9}",
            "0x10",
            "0xFF",
            "0b11",
            "3:30",
            "10:1",
            "$3k",
            "2.5M",
        ),
        *(
            "1.5 dozen",
            "3bn",
            "3-5",
            "3\u20135",
            "555-1234",
            "2024-01-31",
            "1/2/2024",
            "31.12.2024",
            "10 - 5",
            "1920x1080",
        ),
        *(
            "5 x 4",
            r"5 \times 4",
            "2+3",
            "x-4",
            "GPT-4",
            "H2O",
            "10^x",
            "10^{1/2}",
            r"\boxed{5!}",
            "5(3)",
            "log 5",
            "5i",
        ),
        *("3x", "\u00b15", r"5 \pm 1", "x > 2", r"x \ge 2", "1/2/3"),
    ],
)
def test_digits_of_something_else_are_no_number(text: str) -> None:
    """A time, a date, a list, a name or an expression: the last of its digits would be a wrong number."""
    assert last_number(text) is None


def test_a_number_is_found_in_linear_time() -> None:
    assert last_number("1," * 200_000 + "7") is None
    assert last_number("1 " * 200_000 + "7") == 7
    assert last_number("12," * 200_000 + "7") is None
    assert last_number("7 + " * 200_000 + "7") is None
    assert last_number("1" * 200_000) is not None
    assert last_number("1" + ".000" * 200_000 + ".00") is None
