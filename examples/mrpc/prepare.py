"""Writes the Microsoft Research Paraphrase Corpus as rows of two texts with a label.

python examples/mrpc/prepare.py FOLDER OUT

FOLDER holds msr_paraphrase_train.txt and msr_paraphrase_test.txt; OUT gets train.jsonl (4,076 rows) and test.jsonl
(1,725 rows), with label 1 for a paraphrase. Fields are separated by tabs, and quotes in them are not those of CSV.
"""

import json
import sys
from pathlib import Path

_FIELDS = 5
"""Label, two ids, and two sentences."""


def main(folder: Path, out: Path) -> None:
    """Write both splits."""
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        text = (folder / f"msr_paraphrase_{split}.txt").read_bytes().decode("utf-8-sig")
        _, *lines = text.replace("\r\n", "\n").replace("\r", "\n").strip("\n").split("\n")
        rows = [_row(line) for line in lines]
        (out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _row(line: str) -> dict[str, object]:
    fields = line.replace("<QUOTE>", '"').split("\t")
    assert len(fields) == _FIELDS, line
    return {"label": int(fields[0]), "text": fields[3], "text_pair": fields[4]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
