"""What each extractor takes for the answer, and what it does not."""

import pytest

from ds_finetune.objectives.rewards.extractors import EXTRACTORS

CASES = [
    ("gsm8k", "Janet makes 9 * 2 = $<<9*2=18>>18.\n#### 18", "18"),
    ("gsm8k", "#### 1\nno, it is\n#### $1,234.50 dollars", "1234.5"),
    ("gsm8k", "#### -7.00", "-7"),
    ("gsm8k", "####$-12", "-12"),
    ("gsm8k", "#### 007", "7"),
    ("gsm8k", "the answer is 18", None),
    ("gsm8k", "#### eighteen", None),
    ("choice", "B", "B"),
    ("choice", "(C) because", "C"),
    ("choice", "D. A dog", "D"),
    ("choice", "First I thought answer: A, but the answer is **C**.", "C"),
    ("choice", "Answer: (b)", "B"),
    ("choice", "A dog barks", None),
    ("choice", "**Answer:** B", "B"),
    ("choice", "Answer: $B$", "B"),
    ("choice", r"So it is $\boxed{\text{(D)}}$.", "D"),
    ("choice", "I think the answer I want is C", "C"),
    ("choice", "The answer is not A, it is B.", "B"),
    ("choice", "The answer is A because it rains.", "A"),
    ("choice", "\u7b54\u6848\uff1aB", "B"),
    ("choice", "\u6240\u4ee5\u6b63\u786e\u9009\u9879\u662f C\u3002", "C"),
    ("choice", "R\xe9ponse : D", "D"),
    ("choice", "La respuesta es (b)", "B"),
    ("choice", "Answer: The correct one is B", "B"),
    ("choice", "My choice: B", "B"),
    ("choice", "Correct: C", "C"),
    ("choice", "The answer is: \u201cB\u201d", "B"),
    ("choice", "The answer is 'B'.", "B"),
    ("choice", "Answer: \uff22", "B"),
    ("choice", "the answer is b.", "B"),
    ("choice", "<answer>B</answer>", "B"),
    ("choice", "d", "D"),
    ("choice", "Answer: A or B", None),
    ("choice", "Answer: A and B are equal", "A"),
    ("choice", "The answer is a cat", None),
    ("gsm8k", "#### 5 * 3 = 15", "15"),
    ("choice", "Answer: A bird", None),
    ("choice", "Answer: yes", None),
    ("choice", "Answer: B/C", None),
    ("choice", "A is wrong.\n\n**B**", "B"),
    ("choice", "The answer is B. Option A is wrong.", "B"),
    ("choice", "The correct option is:\n(E) Rome", "E"),
    ("gsm8k", "#### **72**", "72"),
    ("gsm8k", r"#### \boxed{72}", "72"),
    ("gsm8k", "#### 72 (= 36 * 2)", "72"),
    ("gsm8k", "####\n-0.50", "-0.5"),
    ("choice", "All of them", None),
    ("choice", "", None),
    ("json", 'Here: ```json\n{"b": 1, "a": [2, 3]}\n```', '{"a": [2, 3], "b": 1}'),
    ("json", "[1, 2] and [3]", "[1, 2]"),
    ("json", 'a {brace} and {"x": null}', '{"x": null}'),
    ("json", '{"a": ', None),
    ("json", "12", None),
    ("text", "  a\n b\t", "a b"),
]


@pytest.mark.parametrize(("name", "text", "answer"), CASES)
def test_the_answer(name: str, text: str, answer: str | None) -> None:
    assert EXTRACTORS[name](text) == answer
