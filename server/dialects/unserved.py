"""Keys of a body that are known but not served: each is refused by name.

Only keys that the route does not read are looked up here. Such a key is refused when it asks for
something: null, false, nothing and the value in `DEFAULTS` ask for nothing. A sampling parameter in
the wrong place is refused too, because it would be dropped silently.

Samplers of llama.cpp, and of servers whose clients send its names, are known here too. Clients send
most of them with each request, at the values that leave them off. Parameters of a sampler that is
off, such as `mirostat_tau`, ask for nothing by themselves.

Every other key is ignored: routers and clients add their own. Of the known ones these change no
answer: `user`, `metadata`, `store`, `service_tier`, `safety_identifier`, `prompt_cache_key`,
`prompt_cache_retention`, `prediction`, `verbosity` (OpenAI); `data_parallel_rank`,
`routed_dp_rank`, `disagg_prefill_dp_rank`, `routing_key` (which routers add; the rest of that is
read in `legs`); `log_metrics`, `no_logs`, `custom_params`, `spaces_between_special_tokens`,
`guided_decoding_backend`, `stream_interval` (vLLM, SGLang).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from ess.errors import BadInput
from ess.server.process.bounds import JOINED_BYTES_MAX

_LORA: Final = "there are no adapters"
_TEXT_ONLY: Final = "only text is served"
_VECTORS: Final = "give text or token ids"
_CODE: Final = "the server runs no code of its clients"
_FORM: Final = "give response_format, structured_outputs, regex or ebnf"
_REASONING: Final = "reasoning is always given apart, and streamed"
_SAMPLER: Final = "temperature, top_k, top_p, min_p and the penalties are"
_LENGTH: Final = "its name here is max_tokens"

OFF: Final[Mapping[str, float]] = MappingProxyType(
    {
        **dict.fromkeys(("typical_p", "typical", "typ_p", "tfs_z", "tfs", "guidance_scale"), 1.0),
        **dict.fromkeys(("top_n_sigma", "nsigma", "adaptive_target"), -1.0),
        **dict.fromkeys(("mirostat", "mirostat_mode", "xtc_probability", "dry_multiplier"), 0.0),
        **dict.fromkeys(("dynatemp_range", "smoothing_factor", "top_a", "penalty_alpha"), 0.0),
        **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"), 0.0),
        "num_beams": 1.0,
    }
)
"""Samplers that there are not, at the values that leave them off."""

UNSERVED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "functions": "give tools: [{type: function, function: ...}]",
        "function_call": "give tool_choice",
        "chat_template": _CODE,
        "documents": "write them into messages",
        "echo": "/v1/completions has it",
        "suffix": "this model does not fill in",
        "add_special_tokens": "the chat template writes them",
        "stop_regex": "give stop strings, or a regex for the whole answer",
        "lora_path": _LORA,
        "lora_request": _LORA,
        "lora_name": _LORA,
        "lora_id": _LORA,
        "image_data": _TEXT_ONLY,
        "audio_data": _TEXT_ONLY,
        "video_data": _TEXT_ONLY,
        "image": _TEXT_ONLY,
        "audio": _TEXT_ONLY,
        "video": _TEXT_ONLY,
        "multi_modal_data": _TEXT_ONLY,
        "mm_processor_kwargs": _TEXT_ONLY,
        "prompt_embeds": _VECTORS,
        "input_embeds": _VECTORS,
        "input_ids": "/v1/completions and /generate take token ids",
        "task": "",
        "previous_response": "send all items as input",
        "previous_input_messages": "send all items as input",
        "enable_response_messages": "",
        "return_meta_info": "",
        "positional_embed_overrides": _VECTORS,
        "logits_processors": _CODE,
        "custom_logit_processor": _CODE,
        "vllm_xargs": _CODE,
        "beam_width": "there is no beam search",
        "length_penalty": "there is no beam search",
        "early_stopping": "there is no beam search",
        "logprob_token_ids": "give logprobs",
        "token_ids_logprob": "give top_logprobs_num",
        "return_text_in_logprobs": "/detokenize has the texts",
        "return_tokens_as_token_ids": "token ids are returned",
        "return_hidden_states": "",
        "return_routed_experts": "",
        "return_entropy": "",
        "return_indexer_topk": "",
        "return_sampling_mask": "",
        "sampling_logprobs_mode": "",
        "return_flat_raw_top_logprobs": "log probabilities are nested",
        "return_flat_raw_output_top_logprobs": "log probabilities are nested",
        "flat_logprobs": "log probabilities are nested",
        "prompt_logprob_start": "prompt_logprobs are those of the whole prompt",
        "return_spec_tokens_details": "/metrics counts drafts",
        "return_input_ids_in_sglext": "/generate gives ids",
        "return_output_ids_in_sglext": "/generate gives ids",
        "return_weight_versions": "weights never change",
        "return_token_offsets": "",
        "include_stop_str_in_output": "the answer ends before a stop string",
        "skip_special_tokens": "special tokens are left out",
        "return_bytes": "",
        "return_prompt_token_ids": "completions and chats have return_token_ids",
        "require_reasoning": "the form of an answer to /generate holds from its first token on",
        "session_params": "every request has its whole prompt",
        "previous_response_id": (
            "responses are not kept without --keep-responses, nor followed by a body of more than"
            f" {JOINED_BYTES_MAX >> 20} MiB: send all items as input"
        ),
        "conversation": "responses are not kept: send all items as input",
        "background": "/v1/responses has it",
        "context_management": "every request has its whole prompt",
        "max_tool_calls": "the client makes the calls",
        "include_reasoning": _REASONING,
        "separate_reasoning": _REASONING,
        "stream_reasoning": _REASONING,
        **dict.fromkeys(("thinking_token_budget", "max_thinking_tokens"), ""),
        "repetition_detection": "",
        "web_search_options": "there is no search",
        "moderation": "nothing is moderated here",
        "extra_body": "OpenAI's client writes its fields into the body itself: put them there",
        "guided_whitespace_pattern": _FORM,
        "guided_json_object": _FORM,
        "whitespace_pattern": "white space between the parts of JSON is bounded",
        "disable_any_whitespace": "white space between the parts of JSON is bounded",
        "disable_additional_properties": "say additionalProperties in the schema",
        "max_new_tokens": _LENGTH,
        "min_new_tokens": "its name here is min_tokens",
        "max_completion_tokens": _LENGTH,
        "top_logprobs": "its name here is logprobs",
        "sampling_seed": "its name here is seed",
        "json_schema": _FORM,
        "mcp_servers": "the client makes the calls",
        "container": _CODE,
        "thread": "no conversation is kept: send all messages",
        "compaction": "ask for a summary in a message",
        "output_format": "give output_config",
        "structural_tag": "give it in response_format or structured_outputs",
        **dict.fromkeys(("watermark", "watermarking"), ""),
        "truncation_side": "the end of the prompt is kept, which is left",
        "media_io_kwargs": _TEXT_ONLY,
        "prompt_logprob_token_ids": "give prompt_logprobs",
        "trace_decode_token_ids": "",
        "extra_args": _CODE,
        "ngram_corpus_id": "",
        "return_prompt_text": "/detokenize has the text of prompt_token_ids",
        "return_cached_tokens_details": "usage has cached_tokens",
        **dict.fromkeys(OFF, _SAMPLER),
        "samplers": "the order is temperature, top_k, top_p, min_p",
        "temperature_last": "the order is temperature, top_k, top_p, min_p",
        "repeat_penalty": "its name here is repetition_penalty",
        "do_sample": "give temperature: 0 for no sampling",
        "grammar": _FORM,
        "n_probs": "give logprobs",
        "n_predict": _LENGTH,
        "num_predict": _LENGTH,
    }
)
DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **OFF,
        "repeat_penalty": 1.0,
        "do_sample": True,
        "skip_special_tokens": True,
        "n_predict": -1,
        "num_predict": -1,
        "truncation_side": "left",
        "include_reasoning": True,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "beam_width": 1,
        "length_penalty": 1.0,
        "web_search_options": None,  # an empty object asks for a search
    }
)
IN_SAMPLING_PARAMS: Final = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "n", "seed"),
        *("max_tokens", "min_tokens", "max_new_tokens", "min_new_tokens", "sampling_seed"),
        *("regex", "ebnf", "json_schema", "structural_tag", "structured_outputs", "bad_words"),
        *("allowed_token_ids", "truncate_prompt_tokens", "logprobs", "prompt_logprobs"),
        *("no_stop_trim", "response_format"),
    )
)


# vLLM's router and llm-d's sidecar write these into the prefill leg of every body, even where they
# are not read.
BY_ROUTER: Final = frozenset(("max_tokens", "max_completion_tokens", "min_tokens"))


def check(raw: bytes, kind: type[msgspec.Struct]) -> None:
    """Raises BadInput for the first key of a JSON object that asks for what is not served."""
    keys = _keys(raw)
    served = set(kind.__struct_encode_fields__)
    if b'"do_remote_decode"' in bytes(keys.get("kv_transfer_params", b"")):
        served |= BY_ROUTER
    for name, value in keys.items():
        if name in served or (name not in UNSERVED and name not in IN_SAMPLING_PARAMS):
            continue
        if _asks(name, msgspec.json.decode(value)):
            raise BadInput(_sentence(name, served))


def _asks(name: str, wish: Any) -> bool:
    """Whether a key asks for something; 0 turns off every sampler that has no other way."""
    is_zero = name in OFF and wish in (0, False) and OFF[name] <= 0
    return bool(
        wish if name not in DEFAULTS else wish not in (None, DEFAULTS[name]) and not is_zero
    )


def part_of(raw: bytes, name: str) -> bytes:
    """The object under a key of a JSON object; empty if there is no such key."""
    return bytes(_keys(raw).get(name, b""))


def _keys(raw: bytes) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(raw or b"{}", type=dict[str, msgspec.Raw])


def _sentence(name: str, served: set[str]) -> str:
    if "sampling_params" in served and name in IN_SAMPLING_PARAMS:
        return f"{name} is not read here: put it into sampling_params"
    if "max_new_tokens" in served and name in ("max_tokens", "min_tokens"):
        return f"{name} is not read here: its name is {name[:3]}_new_tokens"
    if "max_output_tokens" in served and name in ("max_tokens", "max_completion_tokens"):
        return f"{name} is not read here: its name is max_output_tokens"
    why = UNSERVED.get(name)
    return f"{name} is not served: {why}" if why else f"{name} is not served"
