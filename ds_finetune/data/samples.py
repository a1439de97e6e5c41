"""Reads records as samples: dialogue, plain text, pairs, labelled completions, labelled texts or prompts."""

from collections.abc import Mapping

from ds_finetune.config.objectives import KindName
from ds_finetune.data.classes import target_of
from ds_finetune.data.files import ClassNumber
from ds_finetune.data.messages import shown_value, without_nulls
from ds_finetune.data.preferences import PAIR_LAYOUTS, Preference
from ds_finetune.data.prompts import PROMPT_LAYOUTS, Prompt
from ds_finetune.data.record_layouts import (
    COMPLETION_LAYOUTS,
    LABELLED_LAYOUTS,
    LAYOUTS,
    LabelledCompletion,
    LabelledText,
    LayoutColumns,
    Record,
    Sample,
    check_media,
    check_no_tree,
    check_supervised,
    columns_line,
    default_columns,
    find_layout,
    known_layouts,
    published_columns,
    unread_columns,
    view_columns,
)
from ds_finetune.data.row_kind import RowKind, objectives_of
from ds_finetune.errors import ConfigError, DataError

RowSample = Sample | Preference | LabelledCompletion | LabelledText | Prompt
LAYOUTS_OF: Mapping[KindName, Mapping[str, LayoutColumns]] = {
    "pairs": PAIR_LAYOUTS,
    "marked": COMPLETION_LAYOUTS,
    "labelled": LABELLED_LAYOUTS,
    "dialogue": LAYOUTS,
    "text": {"text": LAYOUTS["text"]},
    "prompts": PROMPT_LAYOUTS,
}


def check_layout_name(layout: str, columns: Mapping[str, str], kind: RowKind) -> None:
    """Raise ConfigError where `data.layout`, or a key of `data.columns`, does not exist for this kind of data rows."""
    layouts = LAYOUTS_OF[kind.name]
    if layout != "auto" and layout not in layouts:
        raise ConfigError(
            f"data.layout is {layout}, and {kind.description}", hint=f"set data.layout to auto, or {', '.join(layouts)}"
        )
    names = {name for each in layouts.values() for name in each.needed | each.optional}
    unknown = [f"{name}: {column}" for name, column in columns.items() if name not in names]
    if unknown:
        raise ConfigError(
            f"data.columns {{{', '.join(unknown)}}} has no effect: {kind.description}, and no layout reads it",
            hint=f"columns are {', '.join(sorted(names))}, each followed by its name in your rows",
        )


def read_row(
    record: Record, kind: RowKind, *, layout: str, columns: Mapping[str, str], where: str
) -> tuple[RowSample, list[str]]:
    """Read a record as a sample. Also returns the names of the record's unused columns.

    `layout` is `auto` or the name of a layout of this kind. DataError where no layout fits, or a column cannot be read.
    """
    check_no_tree(record, where)
    record = {name: without_nulls(value) for name, value in record.items()}
    if kind.name != "labelled":
        record = {name: value.name if isinstance(value, ClassNumber) else value for name, value in record.items()}
    given = {name: value for name, value in record.items() if value is not None}
    check_media(record, columns, where)
    named = columns
    if kind.name in ("dialogue", "text"):
        check_supervised(record, columns, where)
    elif kind.name != "prompts":
        columns = {**default_columns(record, columns), **default_columns(given, columns)}
    layouts = LAYOUTS_OF[kind.name]
    if layout == "auto":
        # Every row of a table has the columns of all rows, so the layout is recognised only by columns with a value.
        record = given if find_layout(given, published_columns(given, columns, layouts), layouts) else record
        columns = published_columns(record, columns, layouts)
        layout = _recognise(record, kind, columns, where)
    chosen = layouts[layout]
    _check_used(record, named, chosen, where)
    view = view_columns(record, chosen, columns, where)
    if kind.name == "prompts":
        # Rewards may read any column of a prompt's data row, so no column counts as unused.
        return chosen.read(view, where).of_record(given), []
    unread = unread_columns(record, chosen, columns)
    if kind.name == "marked":
        good = _read_label(view["label"], columns.get("label", "label"), where)
        return LabelledCompletion(chosen.read(view, where), good), unread
    if kind.name == "labelled":
        target = target_of(view["label"], kind, columns.get("label", "label"), where)
        text, text_pair = chosen.read(view, where)
        return LabelledText(text, text_pair, target), unread
    if kind.name == "pairs" and not kind.has_margin:
        margin = columns.get("margin", "margin")
        return chosen.read({**view, "margin": None}, where), unread + [margin] * (record.get(margin) is not None)
    return chosen.read(view, where), unread


def _read_label(label: object, column: str, where: str) -> bool:
    """True if a label is true or 1 (a good answer), False if false or 0, also as text; DataError for other labels."""
    if isinstance(label, int | str) and str(label).lower() in ("0", "1", "true", "false"):
        return str(label).lower() in ("1", "true")
    raise DataError(
        f"{where}: column `{column}` is {shown_value(label)}, which is no label of an answer",
        hint="give true or 1 for a good answer, false or 0 for a bad one",
    )


def _check_used(record: Record, columns: Mapping[str, str], layout: LayoutColumns, where: str) -> None:
    for key, column in columns.items():
        if column in record and key not in layout.needed | layout.optional:
            raise DataError(
                f"data.columns {{{key}: {column}}} has no effect on {where}: its layout {layout.name} reads "
                f"{', '.join(sorted(layout.needed | layout.optional))}",
                hint="remove the entry, or set data.layout to a layout that reads it",
            )


def _recognise(record: Record, kind: RowKind, columns: Mapping[str, str], where: str) -> str:
    layouts = LAYOUTS_OF[kind.name]
    name = find_layout(record, columns, layouts)
    if name is not None:
        return name
    absent = [f"{key}: {column}" for key, column in columns.items() if column not in record]
    others = f", and data.columns names others: {', '.join(absent)}" if absent else ""
    of_kinds = {"pairs": ("prompt", "chosen", "rejected"), "text": (), "labelled": (), "prompts": ("prompt",)}
    keys = of_kinds.get(kind.name, ("prompt", "completion"))
    raise DataError(
        f"{where} has columns {', '.join(sorted(record))}, which fit no layout{others}; {kind.description}",
        hint=", ".join(
            f"remove the white space around the name of column {key!r}" for key in record if key != key.strip()
        )
        or columns_line(record, *keys)
        or _other_objective(record, columns)
        or f"name them under data.columns; layouts are {known_layouts(layouts)}",
    )


def _other_objective(record: Record, columns: Mapping[str, str]) -> str:
    for kind, layouts in LAYOUTS_OF.items():
        named = columns if kind in ("dialogue", "text") else default_columns(record, columns)
        if find_layout(record, published_columns(record, named, layouts), layouts):
            return f"such rows are for objective {', '.join(objectives_of(kind))}"
    return ""
