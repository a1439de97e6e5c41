"""Draw what a run printed, as README.md shows it, from the output of the quickstart:

    COLUMNS=124 bash scripts/quickstart.sh runs/quickstart 2>&1 | tee quickstart.log
    python scripts/picture.py quickstart.log docs/images/run.svg

Every line of the picture is a line of that file. Left out are the log of DeepSpeed's launcher, the progress of answers
during evaluation, the details of the verified export, and notes of more than 180 characters.
"""

import io
import re
import sys
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH, LONGEST = 124, 180
OTHERS = re.compile(
    r"^\[\d{4}-|^using |^answers\b|^  91 tensors|^  names are|^  the files|^to use |^\*{9}|^Setting OMP"
)
"""Lines of the launcher and the installation, progress, and what an export was compared with."""
FONTS = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)
"""Rich's template loads fonts from another host; a picture needs none but the viewer's own."""


def program_lines(text: str) -> list[str]:
    """The lines of the program itself."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not OTHERS.search(line)]
    return [line for line in lines if len(line) <= LONGEST]


def styled(line: str) -> Text:
    """A line with its evaluation, title or question in bold."""
    text = Text(line)
    text.highlight_regex(r"^plan$|^done in .*|^verified|^> .*", "bold green")
    text.highlight_regex(r"loss [\d.]+|exact_match +[\d.]+", "bold")
    return text


def main(log: Path, picture: Path) -> None:
    """Write `picture` from `log`."""
    console = Console(record=True, file=io.StringIO(), width=WIDTH, highlight=False, force_terminal=True)
    for line in program_lines(log.read_text(encoding="utf-8")):
        console.print(styled(line))
    svg = console.export_svg(
        title="bash scripts/quickstart.sh", theme=MONOKAI, code_format=FONTS.sub("", CONSOLE_SVG_FORMAT)
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text("".join(f"{line.rstrip()}\n" for line in svg.splitlines()), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
