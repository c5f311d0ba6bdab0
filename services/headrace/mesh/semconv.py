"""Attributes of the spans, by the names of OpenTelemetry's semantic conventions (messaging, gen_ai, error).

The names stand here as text, since the installed package keeps the unstable ones in a private module; a
test compares each of them with that package. What the conventions have no word for begins with `headrace.`.
No attribute ever carries text of a prompt or an answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from headrace.contracts.generation import Generation
from headrace.contracts.messages import Choice, Result, Task, Usage

Value: TypeAlias = str | int | float | bool | list[str]
Attributes: TypeAlias = dict[str, Value]

ERROR_TYPE: Final = "error.type"

MESSAGING_SYSTEM: Final = "messaging.system"
MESSAGING_OPERATION_NAME: Final = "messaging.operation.name"
MESSAGING_OPERATION_TYPE: Final = "messaging.operation.type"
MESSAGING_DESTINATION_NAME: Final = "messaging.destination.name"
MESSAGING_CONSUMER_GROUP_NAME: Final = "messaging.consumer.group.name"
MESSAGING_MESSAGE_ID: Final = "messaging.message.id"
MESSAGING_MESSAGE_BODY_SIZE: Final = "messaging.message.body.size"
MESSAGING_BATCH_MESSAGE_COUNT: Final = "messaging.batch.message_count"
MESSAGING_CLIENT_ID: Final = "messaging.client.id"

GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
GEN_AI_REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_AGENT_NAME: Final = "gen_ai.agent.name"
GEN_AI_CONVERSATION_ID: Final = "gen_ai.conversation.id"
GEN_AI_TOOL_NAME: Final = "gen_ai.tool.name"
GEN_AI_TOOL_TYPE: Final = "gen_ai.tool.type"
GEN_AI_TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"


def of_job(*, job: str, function: str, tenant: str, lane: str) -> Attributes:
    """What a submit is about."""
    return {
        "headrace.job": job,
        "headrace.function": function,
        "headrace.tenant": tenant,
        "headrace.lane": lane,
    }


def of_item(item: Task | Result) -> Attributes:
    """Which item a message carries; `messaging.message.id` is equal on each hop of the item."""
    return {
        MESSAGING_SYSTEM: "nats",
        MESSAGING_MESSAGE_ID: f"{item.job}/{item.index}@{item.generation}",
        "headrace.job": item.job,
        "headrace.index": item.index,
        "headrace.function": item.function,
        "headrace.tenant": item.tenant,
    }


def operation(kind: str, name: str, stream: str) -> Attributes:
    """What is done to a message: `kind` is `send` or `process`; the stream is the destination, since a
    subject names the job, of which there is no bound.
    """
    return {
        MESSAGING_OPERATION_TYPE: kind,
        MESSAGING_OPERATION_NAME: name,
        MESSAGING_DESTINATION_NAME: stream,
    }


def asked(params: Generation, *, chat: bool, engine: str, model: str, max_tokens: int) -> Attributes:
    """The request to a model. Parameters at their defaults are left out."""
    attributes: Attributes = {
        GEN_AI_OPERATION_NAME: "chat" if chat else "text_completion",
        GEN_AI_PROVIDER_NAME: engine,
        GEN_AI_REQUEST_MODEL: model,
        GEN_AI_REQUEST_MAX_TOKENS: max_tokens,
    }
    optional: dict[str, float | None] = {
        GEN_AI_REQUEST_CHOICE_COUNT: params.n if params.n != 1 else None,
        GEN_AI_REQUEST_TEMPERATURE: params.temperature,
        GEN_AI_REQUEST_TOP_P: params.top_p,
        GEN_AI_REQUEST_TOP_K: params.top_k,
        GEN_AI_REQUEST_SEED: params.seed,
        GEN_AI_REQUEST_FREQUENCY_PENALTY: params.frequency_penalty or None,
        GEN_AI_REQUEST_PRESENCE_PENALTY: params.presence_penalty or None,
    }
    attributes.update((name, value) for name, value in optional.items() if value is not None)
    return attributes


def answered(*, model: str, usage: Usage, choices: Iterable[Choice]) -> Attributes:
    """What came back of a model."""
    attributes: Attributes = {
        GEN_AI_RESPONSE_MODEL: model,
        GEN_AI_RESPONSE_FINISH_REASONS: [choice.finish_reason for choice in choices],
        GEN_AI_USAGE_INPUT_TOKENS: usage.prompt_tokens,
        GEN_AI_USAGE_OUTPUT_TOKENS: usage.completion_tokens,
    }
    if usage.cached_tokens:
        attributes[GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] = usage.cached_tokens
    return attributes
