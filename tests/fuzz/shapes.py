"""Request bodies as the server's own OpenAPI document describes them, and as other servers do."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz import values

# Of vLLM, SGLang and OpenAI: a server may serve, refuse or ignore them, and must survive them.
FOREIGN = (
    *("best_of", "suffix", "logprobs", "top_logprobs", "seed", "user", "store", "metadata"),
    *("service_tier", "parallel_tool_calls", "functions", "function_call", "guided_json"),
    *("guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern", "bad_words"),
    *("allowed_token_ids", "truncate_prompt_tokens", "prompt_embeds", "cache_salt", "lora_path"),
    *("stop_regex", "min_tokens", "length_penalty", "early_stopping", "spaces_between_special"),
    *("chat_template", "add_generation_prompt", "continue_final_message", "documents", "mm_data"),
    *("image_data", "audio_data", "return_hidden_states", "bootstrap_host", "bootstrap_room"),
    *("kv_transfer_params", "logits_processors", "custom_logit_processor", "vllm_xargs"),
    *("return_text_in_logprobs", "token_ids_logprob", "structural_tag", "separate_reasoning"),
)
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_FUNCTION = {"name": "f", "description": "does f", "parameters": _SCHEMA}
LIKELY: dict[str, list[Any]] = {
    "prompt": ["a", ["a", "b"], [5, 6], [[5], [6]], "x" * 500],
    "messages": [
        [{"role": "user", "content": "a"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": _PARTS}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "r"},
        ],
        [{"role": "developer", "content": "a", "tools": [{"function": _FUNCTION}]}],
    ],
    "text": ["a", ["a", "b"]],
    "input_ids": [[5, 6], [[5], [6]]],
    "token_ids": [[5, 6]],
    "tokens": [[5, 6], [[5]], [300, 4000]],
    "model": ["test-model", "unknown"],
    "sampling_params": [{}, {"max_tokens": 3}, {"max_new_tokens": 3, "regex": "a+"}],
    "max_tokens": [1, 5],
    "max_completion_tokens": [1, 5],
    "n": [1, 2, 4],
    "stop": ["e", ["e", "o"]],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}],
    "tools": [[{"type": "function", "function": _FUNCTION}]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "logit_bias": [{"5": 1.5}],
    "stop_token_ids": [[1, 2]],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}},
    ],
    "structured_outputs": [{"json": _SCHEMA}, {"regex": "a+"}],
    "chat_template_kwargs": [{"thinking": True}, {"enable_thinking": False}],
    "rid": ["mine", ["a", "b"]],
    "request_ids": [["mine"]],
    "logprobs": [True, 2, 0],
    "top_logprobs": [2],
    "return_logprob": [True, [True, False]],
    "top_logprobs_num": [2],
    "prompt_logprobs": [1],
}


class Shapes:
    def __init__(self, document: dict[str, Any]) -> None:
        self._schemas = document["components"]["schemas"]
        self.roots = {
            path: operation["post"]
            .get("requestBody", {})
            .get("content", {})
            .get("application/json", {})
            .get("schema", {})
            for path, operation in document["paths"].items()
            if "post" in operation
        }

    def fields(self, path: str) -> set[str]:
        return set(self._resolved(self.roots[path]).get("properties", {}))

    def body(self, source: random.Random, path: str) -> Any:
        return self._object(source, self._resolved(self.roots[path]), 3)

    def foreign(self, source: random.Random) -> tuple[str, Any]:
        return source.choice(FOREIGN), values.value(source, 2)

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def _object(self, source: random.Random, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        share, required = source.random() * 0.5, schema.get("required", ())
        return {
            name: self._field(source, name, inner, depth)
            for name, inner in schema.get("properties", {}).items()
            if name in required or source.random() < share
        }

    def _field(self, source: random.Random, name: str, schema: dict[str, Any], depth: int) -> Any:
        kind = source.random()
        if name in LIKELY and kind < 0.7:
            return source.choice(LIKELY[name])
        return self._of(source, schema, depth) if kind < 0.9 else values.value(source, 2)

    def _of(self, source: random.Random, schema: dict[str, Any], depth: int) -> Any:
        schema = self._resolved(schema)
        if depth <= 0:
            return None
        if "enum" in schema:
            return source.choice(schema["enum"])
        options = schema.get("anyOf") or schema.get("oneOf") or ()
        if options:
            return self._of(source, source.choice(options), depth)
        kinds = schema.get("type", "any")
        match source.choice(kinds) if isinstance(kinds, list) else kinds:
            case "object":
                return self._object(source, schema, depth - 1)
            case "array":
                items = schema.get("items", {})
                return [self._of(source, items, depth - 1) for _ in range(source.randrange(4))]
            case "string":
                return values.text(source)
            case "boolean":
                return source.random() < 0.5
            case "integer" | "number":
                return source.choice((0, 1, 2, 0.5, -1, 16, 257))
            case "null":
                return None
        return values.value(source, 2)
