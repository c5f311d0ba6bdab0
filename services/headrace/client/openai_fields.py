"""What each field of an OpenAI Batch `body` may be: honoured, harmless, or refused with its reason.

Sources: the API reference of `/v1/chat/completions` and `/v1/completions`, and the extra parameters of
vLLM's OpenAI-compatible server. A field that none of these tables names is refused as unknown.
"""

from __future__ import annotations

from typing import Any, Final

HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
"""Fields that are accepted with these values only, since they ask for what happens anyway."""

REASONS: Final[dict[str, str]] = {
    "add_generation_prompt": "the prompt of the assistant is always added",
    "best_of": "choosing the best of several is not supported: ask for n",
    "continue_final_message": "continuing the last message is not supported",
    "echo": "the prompt is not repeated in the output",
    "length_penalty": "beam search is not supported",
    "modalities": "only text is supported",
    "parallel_tool_calls": "the number of tool calls cannot be limited",
    "return_token_ids": "not supported in this form",
    "return_tokens_as_token_ids": "not supported in this form",
    "service_tier": "there are no tiers: the lane of the job (urgent, normal, bulk) says how soon it runs",
    "store": "answers are not kept for later retrieval by id: they are the job's results",
    "stream": "a batch has no stream: leave it out or set it to false",
    "suffix": "inserting before a suffix is not supported",
    "use_beam_search": "beam search is not supported",
    # Refused with any value but null.
    "add_special_tokens": "special tokens are added as the model's own tokenizer does",
    "audio": "audio output is not supported",
    "cache_salt": "the prefix cache is not partitioned",
    "chat_template": "only the model's own chat template is used",
    "documents": "documents for the chat template are not supported: put them into the messages",
    "function_call": "deprecated: use tool_choice",
    "functions": "deprecated: use tools",
    "guided_decoding_backend": "the worker chooses its own",
    "guided_whitespace_pattern": "not supported",
    "kv_transfer_params": "not supported",
    "metadata": "it would not come back with the results: use custom_id",
    "mm_processor_kwargs": "only text is supported",
    "prediction": "predicted outputs are not supported",
    "prompt_embeds": "prompts as embeddings are not supported",
    "reasoning_effort": "not supported: use chat_template_kwargs if the model's template has such a switch",
    "repetition_detection": "not supported",
    "request_id": "ids are made of the job and the index: use custom_id",
    "stream_options": "a batch has no stream",
    "thinking_token_budget": "not supported",
    "verbosity": "not supported",
    "vllm_xargs": "not supported",
    "web_search_options": "nothing is searched on the web",
}
"""Why a field, or any other value of a harmless one, is refused."""

REFUSED: Final = tuple(name for name in REASONS if name not in HARMLESS)

LABELS: Final[dict[str, str]] = {
    "prompt_cache_key": "it only helps OpenAI to route requests with a common prefix",
    "prompt_cache_retention": "it only tells OpenAI how long to keep a prefix",
    "safety_identifier": "it only labels the end user for OpenAI's abuse checks",
    "user": "it only labels the end user for OpenAI's abuse checks",
}
"""Accepted without an effect, and the receipt says so: they cannot change an answer or be missed in one."""

CHAT_ONLY: Final = (
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "modalities",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
COMPLETIONS_ONLY: Final = ("prompt", "suffix", "best_of")
