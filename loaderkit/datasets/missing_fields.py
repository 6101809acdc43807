"""Why a sample of a cache has no such field, and what to write in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit.arguments import refuse_value
from loaderkit.datasets.kinds import NEST_KINDS, Kind
from loaderkit.datasets.list_forms import are_kept_apart
from loaderkit.datasets.structure import Leaf, Nest, fields_of_variant, is_graph
from loaderkit.errors import DatasetError
from loaderkit.nearest_names import suggest_name
from loaderkit.value_words import with_small_article

if TYPE_CHECKING:
    from collections.abc import Callable

    from loaderkit.datasets.opened import OpenedCache
    from loaderkit.datasets.structure import Node, StoreKey
    from loaderkit.errors import LoaderkitError, OptionError


@dataclass(frozen=True)
class MissingField:
    """A field that was asked for, and a sample that has none of its name."""

    opened: OpenedCache
    """The cache."""
    number: int
    """Number of the sample's variant."""
    name: str
    """The field."""
    row: int
    """The sample."""
    key: StoreKey
    """The type that the field should belong to; None for fields of whole samples."""

    @property
    def variant(self) -> Leaf | Nest:
        """What the sample is made of."""
        return self.opened.structure.variants[self.number]

    @property
    def names(self) -> list[str]:
        """The fields that the sample has, of the same type."""
        return sorted(fields_of_variant(self.variant, self.key))

    @property
    def types(self) -> list[str | tuple[str, ...]]:
        """The types of nodes and edges that the sample has."""
        if not is_graph(self.variant):
            return []
        return [key for key in self.variant.keys if key is not None]

    def error(self) -> LoaderkitError:
        """Return what to raise."""
        name: object = self.name  # a type of edges is a tuple
        questions = _QUESTIONS if isinstance(name, str) else _QUESTIONS_ABOUT_TYPES
        answers = filter(None, (question(self) for question in questions))
        answer = next(answers, None)  # of the first that knows
        if answer is None:
            return refuse_field_name(self.opened, name)
        message = answer.message or self._message()
        return DatasetError(message, why=answer.why, fix=answer.fix)

    def _message(self) -> str:
        of_type = "" if self.key is None else f" of {self.key!r}"
        path = self.opened.store.path
        return f"Sample {self.row} of {path} has no field {self.name!r}{of_type}."


class _Advice(NamedTuple):
    why: str
    fix: str
    message: str = ""
    """In the place of "Sample 3 of CACHE has no field 'x'."."""


def _is_of_a_type(missing: MissingField) -> _Advice | None:
    if missing.key is not None:
        return None
    for key in missing.types:
        if missing.name in fields_of_variant(missing.variant, key):
            return _Advice(
                f"it is a field of {key!r}", f"dataset[{key!r}].{missing.name}"
            )
    return None


def _is_a_type(missing: MissingField) -> _Advice | None:
    if missing.key is not None or missing.name not in missing.types:
        return None
    why = "it is a type of the graphs, and not one of their fields"
    return _Advice(why, f"dataset[{missing.name!r}]")


def _others_have_it(missing: MissingField) -> _Advice | None:
    name, key = missing.name, missing.key
    variants = missing.opened.structure.variants
    if not any(name in fields_of_variant(variant, key) for variant in variants):
        return None
    of_type = "" if key is None else f" of {key!r}"
    message = f"Not all samples have a field {name!r}{of_type}: "
    message += f"sample {missing.row} of {missing.opened.store.path} has none."
    why = "a column has a value of each sample; None as a field of a graph is none"
    has_it = f"{name!r} in sample" if key is None else f"{name!r} in sample[{key!r}]"
    asked = f"column({name!r})" if key is None else f"column({name!r}, of_type={key!r})"
    return _Advice(why, f"dataset.filter(lambda sample: {has_it}).{asked}", message)


def _is_a_path(missing: MissingField) -> _Advice | None:
    outer, dot, inner = missing.name.replace("/", ".").partition(".")
    if not dot or outer not in missing.names:
        return None
    why = f"{outer!r} is a field, and {inner!r} is probably within it"
    node: Node | None = fields_of_variant(missing.variant, missing.key)[outer]
    path: tuple[Any, ...] = (outer,)
    steps, is_apart = "", False
    for step in inner.split("."):
        is_apart = is_apart or are_kept_apart([missing.opened.list_forms], path)
        key, node = _key_within(node, step)
        steps, path = f"{steps}[{key!r}]", (*path, key)
    if is_apart:
        # A column has the lists of the samples, and no items of theirs.
        return _Advice(why, f"[sample[{outer!r}]{steps} for sample in dataset]")
    return _Advice(why, f"dataset[{outer!r}]{steps}")


def _key_within(node: Node | None, step: str) -> tuple[Any, Node | None]:
    """Give the key that a step of a path is in a container, and what is there.

    A list has its items by number, and a dict may have numbers for keys.
    """
    if isinstance(node, Leaf) and node.column.kind is Kind.JSON:
        # Lists of plain values are a leaf, with lists in them or not.
        return (int(step) if step.isdecimal() else step), node
    parts = dict(node.items()) if isinstance(node, Nest) else {}
    by_text = {str(key): key for key in parts}
    if step in by_text:
        key = by_text[step]
        return key, parts[key]
    is_list = isinstance(node, Nest) and NEST_KINDS[node.kind].is_sequence
    return (int(step) if is_list and step.isdecimal() else step), None


def _is_the_item_of_a_tuple(missing: MissingField) -> _Advice | None:
    variant = missing.variant
    if not isinstance(variant, Nest) or not NEST_KINDS[variant.kind].is_sequence:
        return None
    first = missing.name.partition(".")[0]
    if not first.isdecimal() or int(first) >= len(variant.children):
        return None
    kind = with_small_article(str(variant.kind))
    why = f"each sample is {kind}, whose items have numbers and no names"
    return _Advice(why, f"dataset.batch(range(len(dataset)))[{int(first)}]")


def _is_the_number_of_a_sample(missing: MissingField) -> _Advice | None:
    name = missing.name
    if not name.isdecimal() or int(name) >= len(missing.opened.store):
        return None
    why = "a text asks for a field, and a number for a sample"
    return _Advice(why, f"dataset[{int(name)}]")


def _has_other_fields(missing: MissingField) -> _Advice | None:
    names = missing.names
    if not names:
        return None
    why = f"its fields are {', '.join(names)}"
    if missing.types and missing.key is None:
        why += f", and its types are {', '.join(map(repr, missing.types))}"
        names += [key for key in missing.types if isinstance(key, str)]
    return _Advice(why, suggest_name(missing.name, names))


def _has_types_alone(missing: MissingField) -> _Advice | None:
    if not missing.types:
        return None
    why = f"fields of its graphs belong to a type: {missing.types}"
    return _Advice(why, f"dataset[{missing.types[0]!r}]")


def _has_no_fields(missing: MissingField) -> _Advice | None:
    del missing
    why = "its samples are no dicts, and have no fields with names"
    return _Advice(why, "dataset.batch(range(len(dataset)))")


_QUESTIONS_ABOUT_TYPES: tuple[Callable[[MissingField], _Advice | None], ...] = (
    _is_of_a_type,
    _is_a_type,
)
_QUESTIONS: tuple[Callable[[MissingField], _Advice | None], ...] = (
    *_QUESTIONS_ABOUT_TYPES,
    _others_have_it,
    _is_a_path,
    _is_the_item_of_a_tuple,
    _is_the_number_of_a_sample,
    _has_other_fields,
    _has_types_alone,
    _has_no_fields,
)
"""In this order; the last always knows."""


def refuse_field_name(opened: OpenedCache, given: object) -> OptionError:
    """Return what to raise for what is no name of a field.

    Args:
        opened: The cache.
        given: What was given in the place of a name.
    """
    names = sorted(
        name
        for variant in opened.structure.variants
        for name in fields_of_variant(variant)
    )
    example = names[0] if names else "x"
    return refuse_value("name", given, "the name of a field", example)
