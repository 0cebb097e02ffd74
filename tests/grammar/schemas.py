"""Schemas that use every keyword which can be enforced, alone and together."""

from __future__ import annotations

from typing import Any


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """An object with these properties only, all required unless some are named."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


NODE = closed({"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})
TREE = closed({"name": {"enum": ["a", "b"]}, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}})
SHAPES = [
    closed({"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}}),
    closed({"kind": {"const": "square"}, "side": {"type": "number", "exclusiveMinimum": 0}}),
]

SCHEMAS: dict[str, Any] = {
    # types
    "anything": {},
    "true": True,
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "string": {"type": "string"},
    "array": {"type": "array"},
    "object": {"type": "object"},
    "several types": {"type": ["integer", "null", "boolean"]},
    "string or array": {"type": ["string", "array"], "items": {"type": "integer"}, "maxLength": 5},
    # values
    "enum": {"enum": ["red", "green", 3, None, True, {"a": [1]}]},
    "enum of one type": {"type": "string", "enum": ["é", 'say "hi"', "back\\slash", "new\nline", "💧"]},
    "const": {"const": {"a": [1, None, "x"]}},
    "const string": {"const": "</think>"},
    # numbers
    "minimum": {"type": "integer", "minimum": 17},
    "maximum": {"type": "integer", "maximum": -17},
    "range": {"type": "integer", "minimum": -3, "maximum": 250},
    "open range": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "a range that floats round": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 9},
    "an open range that floats round": {
        "exclusiveMinimum": 2**53 + 1,
        "exclusiveMaximum": 2**53 + 9,
        "type": "integer",
    },
    "64 bits": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "64 bits without a sign": {"type": "integer", "minimum": 2**63 - 4096, "maximum": 2**64 - 1},
    "a large const": {"const": 2**62 + 2**20},
    "real range": {"type": "number", "minimum": -0.5, "maximum": 1.25},
    "open real range": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "multipleOf": {"type": "integer", "multipleOf": 7},
    "multipleOf in a range": {"type": "integer", "multipleOf": 5, "minimum": 12, "maximum": 99},
    "multipleOf a fraction": {"type": "number", "multipleOf": 0.25},
    # strings
    "minLength": {"type": "string", "minLength": 4},
    "maxLength": {"type": "string", "maxLength": 6},
    "one character": {"type": "string", "minLength": 1, "maxLength": 1},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "pattern inside": {"type": "string", "pattern": "[0-9]+[a-z]"},
    "pattern and length": {"type": "string", "pattern": "^a+b*$", "minLength": 3, "maxLength": 5},
    "pattern with quotes": {"type": "string", "pattern": '^["\\\\/]{1,3}$'},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "duration": {"type": "string", "format": "duration"},
    "email": {"type": "string", "format": "email"},
    "hostname": {"type": "string", "format": "hostname"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "uuid": {"type": "string", "format": "uuid"},
    "uri": {"type": "string", "format": "uri"},
    # arrays
    "items": {"type": "array", "items": {"type": "boolean"}},
    "minItems": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "no items": {"type": "array", "maxItems": 0},
    "prefixItems": {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "integer"}],
        "items": False,
        "minItems": 2,
    },
    "prefixItems and more": {
        "type": "array",
        "prefixItems": [{"const": "head"}],
        "items": {"type": "boolean"},
        "minItems": 1,
        "maxItems": 4,
    },
    "items as a list": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "integer"}, {"type": "null"}],
        "additionalItems": False,
    },
    "uniqueItems off": {"type": "array", "items": {"type": "integer"}, "uniqueItems": False, "maxItems": 3},
    "nested arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 2},
        "maxItems": 3,
    },
    # objects
    "properties": closed({"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}}),
    "optional properties": closed({"a": {"type": "integer"}, "b": {"type": "null"}, "c": {"enum": [1]}}, ["b"]),
    "nothing required": closed({"a": {"type": "boolean"}, "b": {"type": "boolean"}}, []),
    "no properties": closed({}),
    "odd names": closed({'quo"te': {"type": "null"}, "sp ace": {"type": "null"}, "é": {"type": "null"}}),
    "open object": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "integer"}},
    "required alone": {"type": "object", "required": ["x"], "properties": {"y": {"type": "boolean"}}},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^n_[a-z]+$": {"type": "integer"}, "^s_[a-z]+$": {"type": "string", "maxLength": 4}},
        "additionalProperties": False,
    },
    "maxProperties": {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 1},
    "a required one and more": {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
        "minProperties": 1,
        "maxProperties": 3,
    },
    # combinations
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    "anyOf of objects": {"anyOf": SHAPES},
    "anyOf beside properties": closed(
        {"kind": {"enum": ["a", "b"]}, "size": {"type": "integer"}},
        anyOf=[{"properties": {"kind": {"const": "a"}}}, {"properties": {"size": {"minimum": 5, "maximum": 9}}}],
    ),
    "oneOf": {"oneOf": SHAPES},
    "oneOf of types": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 8}, "b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "additionalProperties": True,
    },
    "allOf of numbers": {"type": "integer", "allOf": [{"minimum": 2}, {"maximum": 4}]},
    "nullable": closed({"a": {"type": "integer", "nullable": True}, "b": {"$ref": "#/$defs/b", "nullable": True}})
    | {"$defs": {"b": {"type": "boolean"}}},
    "optional by anyOf": closed({"a": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]}}),
    # references
    "$ref": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
    "definitions": closed({"p": {"$ref": "#/definitions/point"}})
    | {"definitions": {"point": closed({"x": {"type": "number"}, "y": {"type": "number"}})}},
    "$ref beside keywords": {"$ref": "#/$defs/a", "maximum": 9, "$defs": {"a": {"type": "integer", "minimum": 7}}},
    "recursive list": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "recursive tree": TREE,
    "anchor": {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "boolean"}}},
    # what only describes
    "described": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T",
        "description": "d",
        "default": 1,
        "examples": [2],
        "$comment": "c",
        "deprecated": True,
        "readOnly": True,
        "type": "integer",
        "x-unknown": 1,
    },
    "an order": closed(
        {
            "id": {"type": "string", "pattern": "^[0-9]{4}$"},
            "lines": {
                "type": "array",
                "items": closed(
                    {"sku": {"type": "string", "maxLength": 6}, "count": {"type": "integer", "minimum": 1}}
                ),
                "minItems": 1,
                "maxItems": 2,
            },
            "paid": {"type": ["boolean", "null"]},
            "total": {"type": "number", "minimum": 0},
        }
    ),
}
