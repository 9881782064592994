"""The form of a config, generated from its JSON schema, and the way back from posted text to data.

`build` turns schema, data and errors into a tree of Leaf, Section, Choice and Items that one recursive template
macro renders. `parse` walks the same schema over the posted fields. Text that is no number stays text, so that the
schema itself names the field that is wrong; nothing is validated twice.

A posted field is named by its dotted path: `stages.1.optimizer.learning_rate`. A choice also posts the kind it was
rendered with (`….kind.shown`): when another kind is chosen, fields that both kinds have under one name but with
different defaults take the new default, since 0.2 is a wide clip in one loss and none at all in another. A section
that may be absent is a choice between off and on, posted the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from app.form_fields import MISSING, choices_of, is_list_of_parts, kind_of, leaf_value, text_of
from app.form_nodes import GIVEN, Choice, Items, Leaf, Section, label

Schema = dict[str, Any]


class SchemaForm:
    """Form of one JSON schema with `$defs`."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.defs: dict[str, Schema] = schema.get("$defs", {})

    def build(self, data: Mapping[str, Any], errors: Mapping[str, str] | None = None) -> Section:
        return _Builder(self, dict(errors or {})).section(self.schema, data, "", "run")

    def parse(self, posted: Mapping[str, str]) -> dict[str, Any]:
        """Data of a posted form; raises nothing. Fields left empty take their default, or None where allowed."""
        value = self._parse(self.schema, "", posted)
        return value if isinstance(value, dict) else {}

    def blank(self, path: str, variant: str) -> dict[str, Any]:
        """A new item of the list at `path`, of the named variant; its fields take their defaults."""
        schema = self.at(path)
        key = self.variants(schema["items"])[0]
        return {key: variant} if key else {}

    def at(self, path: str) -> Schema:
        """Schema of the list or object at a dotted path; unions on the way are searched for the next name."""
        schema = self.schema
        for name in path.split(".") if path else []:
            schema = self._step(self.resolve(schema), name)
        return self.resolve(schema)

    def _step(self, schema: Schema, name: str) -> Schema:
        if name.isdigit():
            return dict(schema["items"])
        options = list(self.variants(schema)[1].values()) or [schema]
        for option in options:
            if name in option.get("properties", {}):
                return dict(option["properties"][name])
        raise KeyError(name)

    def resolve(self, schema: Schema) -> Schema:
        """The schema with its `$ref` followed; `X | None` becomes X marked nullable."""
        if "$ref" in schema:
            target = self.defs[schema["$ref"].rsplit("/", 1)[1]]
            schema = {**target, **{k: v for k, v in schema.items() if k != "$ref"}}
        options = schema.get("anyOf", [])
        real = [option for option in options if option.get("type") != "null"]
        if options and len(real) == 1:
            outside = {k: v for k, v in schema.items() if k != "anyOf"}
            return {**self.resolve(real[0]), **outside, "nullable": len(real) < len(options)}
        return schema

    def variants(self, schema: Schema) -> tuple[str, dict[str, Schema]]:
        """Discriminating field and variants by its value; ("", {}) when the schema is no union."""
        schema = self.resolve(schema)
        if "discriminator" not in schema:
            return "", {}
        mapping = schema["discriminator"]["mapping"]
        return schema["discriminator"]["propertyName"], {k: self.resolve({"$ref": v}) for k, v in mapping.items()}

    def _parse(self, schema: Schema, path: str, posted: Mapping[str, str]) -> Any:
        schema = self.resolve(schema)
        key, variants = self.variants(schema)
        if variants:
            if _join(path, key) not in posted:
                return MISSING  # the form that was shown had no such part
            chosen = posted[_join(path, key)]
            variant = variants.get(chosen) or next(iter(variants.values()))
            shown = variants.get(posted.get(f"{_join(path, key)}.shown", chosen), variant)
            value = self._parse_object(variant, path, posted, fresh=_other_defaults(shown, variant))
            return {key: chosen or next(iter(variants)), **{k: v for k, v in value.items() if k != key}}
        if "properties" in schema:
            parse = self._parse_optional if schema.get("nullable") else self._parse_object
            return parse(schema, path, posted)
        if is_list_of_parts(schema):
            length = posted.get(f"{path}.length", "")
            count = int(length) if length.isdecimal() else 0
            items = [self._parse(schema["items"], _join(path, str(index)), posted) for index in range(min(count, 50))]
            return [{} if item is MISSING else item for item in items]
        return leaf_value(schema, path, posted)

    def _parse_optional(self, schema: Schema, path: str, posted: Mapping[str, str]) -> Any:
        """A section that may be absent. Just switched on, it was not shown before: its fields take their defaults."""
        switch = _join(path, GIVEN)
        if switch not in posted:
            return MISSING
        if posted[switch] != "on":
            return None
        was_shown = posted.get(f"{switch}.shown", "on") == "on"
        return self._parse_object(schema, path, posted, fresh=() if was_shown else schema["properties"])

    def _parse_object(
        self, schema: Schema, path: str, posted: Mapping[str, str], fresh: Collection[str] = ()
    ) -> dict[str, Any]:
        """`fresh`: fields that take their default, whatever was posted."""
        names = {name: child for name, child in schema.get("properties", {}).items() if name not in fresh}
        values = {name: self._parse(child, _join(path, name), posted) for name, child in names.items()}
        return {name: value for name, value in values.items() if value is not MISSING}


@dataclass
class _Builder:
    form: SchemaForm
    errors: dict[str, str]

    def node(self, schema: Schema, value: Any, path: str, name: str, required: bool) -> Any:
        schema = self.form.resolve(schema)
        if self.form.variants(schema)[1]:
            return self.choice(schema, value, path, name)
        if "properties" in schema:
            return (self.optional if schema.get("nullable") else self.section)(schema, value, path, name)
        if is_list_of_parts(schema):
            return self.items(schema, value, path, name)
        return self.leaf(schema, value, path, name, required)

    def section(self, schema: Schema, value: Any, path: str, name: str, skip: str = "") -> Section:
        children = self.children(schema, value, path, skip)
        return Section(path, label(name), schema.get("description", ""), children, self.errors.get(path, ""))

    def children(self, schema: Schema, value: Any, path: str, skip: str = "") -> list[Any]:
        data = value if isinstance(value, Mapping) else {}
        required = schema.get("required", [])
        return [
            self.node(child, data.get(name, child.get("default")), _join(path, name), name, name in required)
            for name, child in schema.get("properties", {}).items()
            if name != skip
        ]

    def choice(self, schema: Schema, value: Any, path: str, name: str) -> Choice:
        key, variants = self.form.variants(schema)
        chosen = str(value.get(key, "")) if isinstance(value, Mapping) else ""
        chosen = chosen if chosen in variants else next(iter(variants))
        variant = variants[chosen]
        children = self.children(variant, value, path, skip=key)
        error = self.errors.get(path, "") or self.errors.get(_join(path, key), "")
        return Choice(
            path,
            label(name),
            variant.get("description", ""),
            children,
            error,
            key=key,
            value=chosen,
            choices=list(variants),
            changed="default" in schema and chosen != str((schema["default"] or {}).get(key)),
        )

    def optional(self, schema: Schema, value: Any, path: str, name: str) -> Choice:
        """A section that may be absent; its fields are shown while it is on."""
        given = isinstance(value, Mapping)
        children = self.children(schema, value, path) if given else []
        return Choice(
            path,
            label(name),
            schema.get("description", ""),
            children,
            self.errors.get(path, ""),
            key=GIVEN,
            value="on" if given else "off",
            choices=["off", "on"],
            changed=given != isinstance(schema.get("default"), Mapping),
        )

    def items(self, schema: Schema, value: Any, path: str, name: str) -> Items:
        rows = value if isinstance(value, list) else []
        singular = name.removesuffix("s")
        items = [
            self.node(schema["items"], row, _join(path, str(index)), f"{singular} {index + 1}", True)
            for index, row in enumerate(rows)
        ]
        choices = list(self.form.variants(schema["items"])[1])
        return Items(path, label(name), schema.get("description", ""), items, choices, self.errors.get(path, ""))

    def leaf(self, schema: Schema, value: Any, path: str, name: str, required: bool) -> Leaf:
        text, default = text_of(schema, value), text_of(schema, schema.get("default"))
        return Leaf(
            path=path,
            label=label(name),
            help=schema.get("description", ""),
            kind=kind_of(schema),
            value=text,
            choices=choices_of(schema),
            required=required,
            nullable=bool(schema.get("nullable")),
            default=default,
            changed=not required and text != default,
            error=self.errors.get(path, ""),
        )


def _other_defaults(old: Schema, new: Schema) -> set[str]:
    """Fields that two kinds have under one name, with different defaults, and checkboxes that only the new kind has:
    a browser posts nothing for a box that it did not show, which is not the same as an empty one."""
    before, after = old.get("properties", {}), new.get("properties", {})
    differ = {
        name for name in before.keys() & after.keys() if before[name].get("default") != after[name].get("default")
    }
    return differ | {name for name in after.keys() - before.keys() if after[name].get("type") == "boolean"}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
