"""The bodies of requests in OpenAI's dialect, with vLLM's additions, as schemas, and their SamplingParams.

Schemas check types and sizes, SamplingParams checks ranges; chat and openai_answer interpret the other fields. A field
that a schema does not know is refused, at every depth. Fields marked "no effect" are known because clients send them,
such as those of an answer that comes back as part of the conversation.
"""

from collections.abc import Mapping
from json import dumps
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, field, structs

from anabranch.sampling_params import Grammar, SamplingParams
from anabranch.server.errors import bad_request

MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_PROMPTS = 1024
MAX_TOKENIZED = 4_000_000  # characters for /tokenize

Name = Annotated[str, Meta(max_length=512)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Word = Annotated[str, Meta(min_length=1, max_length=256)]
StopTexts = Annotated[list[StopText], Meta(max_length=64)]
Words = Annotated[list[Word], Meta(max_length=1024)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Meta(max_length=1024)]
ManyTokenIds = Annotated[list[TokenId], Meta(max_length=2**18)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1, max_length=65536)]], Meta(max_length=10_000)]
LogitBias = Annotated[dict[Annotated[str, Meta(max_length=16)], float], Meta(max_length=1024)]
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]

SAME_NAME = (
    ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    + ("n", "seed", "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
    + ("prompt_logprobs", "return_routed_experts")
)
LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's fields before structured_outputs → its fields."""
OBJECT = {"type": "object"}


class StrictObject(Struct, forbid_unknown_fields=True):
    """A body, or an object in one. One with a `type` lists the known types, so that an error about another names its
    type and not one of its fields."""

    TYPES: ClassVar[tuple[str, ...]] = ()
    """Known values of `type`."""
    OTHER_TYPES: ClassVar[str] = ""
    """What is wrong with other values: "'image' cannot be read ..."."""


class StreamOptions(StrictObject, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # no effect


class JsonSchema(StrictObject, kw_only=True):
    name: Name = ""
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(StrictObject, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(StrictObject, kw_only=True):
    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_additional_properties: bool | None = None


class Sampling(StrictObject, kw_only=True):
    """The fields that chats and completions share."""

    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: StopText | StopTexts | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: int | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: ManyTokenIds | None = None
    bad_words: Words | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_routed_experts: bool = False
    cache_salt: Name | None = None
    priority: Priority = 0
    request_id: Name | None = None  # no effect: the header x-request-id names a request

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    user: Name | None = None  # no effect, as all that follow
    best_of: int | None = None
    spaces_between_special_tokens: bool | None = None
    guided_decoding_backend: Name | None = None


class ToolFunction(StrictObject, kw_only=True, omit_defaults=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    returns: dict[str, Any] | None = field(name="return", default=None)
    """From transformers' description of functions; templates may write it."""
    strict: bool | None = None


class Tool(StrictObject, kw_only=True):
    type: Literal["function"]
    function: ToolFunction
    cache_control: Any = None  # no effect


class NamedFunction(StrictObject, kw_only=True):
    name: Name


class NamedTool(StrictObject, kw_only=True):
    type: Literal["function"]
    function: NamedFunction


class FunctionCall(StrictObject, kw_only=True):
    name: Name
    arguments: str | dict[str, Any] | None = None
    parsed_arguments: Any = None  # no effect, as all that follow
    provider_specific_fields: Any = None


class ToolCall(StrictObject, kw_only=True):
    function: FunctionCall
    id: Name | None = None
    type: Literal["function"] = "function"
    index: int | None = None  # no effect, as all that follow
    cache_control: Any = None
    extra_content: Any = None
    provider_specific_fields: Any = None


class ContentPart(StrictObject, kw_only=True):
    """A part of a message's content. Only text can be read."""

    TYPES = ("text", "refusal")
    OTHER_TYPES = "cannot be read: this model takes text only"

    type: Name
    text: str | None = None
    refusal: str | None = None
    id: Any = None  # no effect, as all that follow
    index: Any = None
    annotations: Any = None
    citations: Any = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None
    extras: Any = None


class Message(StrictObject, kw_only=True):
    role: Name
    content: str | list[ContentPart] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    """In place of content that is null."""
    function_call: FunctionCall | None = None
    """The older form of tool_calls, for a single call."""
    id: Any = None  # no effect, as all that follow: clients send answers back as they came
    annotations: Any = None
    parsed: Any = None
    reasoning_details: Any = None
    reasoning_items: Any = None
    thinking_blocks: Any = None
    provider_specific_fields: Any = None
    extra_content: Any = None
    cache_control: Any = None


MessageList = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
ToolList = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoiceField = Literal["none", "auto", "required"] | NamedTool
TemplateOptions = Annotated[dict[Annotated[str, Meta(max_length=64)], Any], Meta(max_length=64)]


class ChatCompletion(Sampling, kw_only=True):
    messages: MessageList
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: ToolList | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Name | None = None
    include_reasoning: bool = True
    chat_template_kwargs: TemplateOptions | None = None
    chat_template: Any = None
    """Refused: a template is a program, and only the operator may provide programs."""
    add_generation_prompt: bool = True

    metadata: dict[str, Any] | None = None  # no effect, as all that follow
    store: bool | None = None
    service_tier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Name | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    safety_identifier: Name | None = None
    verbosity: Name | None = None
    modalities: list[Literal["text"]] | None = None


class Completion(Sampling, kw_only=True):
    prompt: str | list[Any]
    """Text, token ids, or a list of either."""
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True
    suffix: Literal[""] | None = None
    """Filling in text before a suffix is not supported."""


class Tokenize(StrictObject, kw_only=True):
    model: Name | None = None
    prompt: Annotated[str, Meta(max_length=MAX_TOKENIZED)] | None = None
    messages: MessageList | None = None
    tools: ToolList | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateOptions | None = None
    chat_template: Any = None
    return_token_strs: bool = False


class Detokenize(StrictObject, kw_only=True):
    model: Name | None = None
    tokens: ManyTokenIds
    skip_special_tokens: bool = False


def sampling_params(body: Sampling, defaults: Mapping[str, Any] = MappingProxyType({}), **fixed: Any) -> SamplingParams:
    """`defaults` are the model's, for fields that the request leaves out. `fixed` are the dialect's: logprobs, grammar,
    and max_tokens where the request has none. A request may ask for more tokens than the context has room for: the
    engine ends the answer there, with finish_reason "length"."""
    given: dict[str, Any] = {**defaults}
    given |= {name: getattr(body, name) for name in SAME_NAME if getattr(body, name) is not None}
    given |= {name: tuple(value) for name in LISTS if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias is not None:
        if wrong := [token for token in body.logit_bias if not (token.isascii() and token.isdigit())]:
            raise bad_request(f"logit_bias: {wrong[0]!r} is not a token id", "logit_bias")
        given["logit_bias"] = {int(token): value for token, value in body.logit_bias.items()}
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request(
            "best_of must equal n: choosing among more answers than asked for is not supported", "best_of"
        )
    name = "max_tokens"
    if isinstance(body, ChatCompletion) and body.max_completion_tokens is not None:
        name = "max_completion_tokens"
    if (wanted := getattr(body, name)) is not None:
        fixed["max_tokens"] = wanted
    try:
        return SamplingParams(**given, **fixed)
    except ValueError as error:  # its message begins with the parameter's name
        message = str(error)
        if message.startswith("max_tokens"):
            message = message.replace("max_tokens", name, 1)
        raise bad_request(message, message.split(maxsplit=1)[0].rstrip(":")) from None


def grammar(body: Sampling) -> Grammar | None:
    """The grammar of the output, whichever field gives it; two fields contradict each other."""
    given: dict[str, dict[str, Any]] = {}
    if body.response_format is not None and body.response_format.type != "text":
        given["response_format"] = {"json": _response_schema(body.response_format)}
    if body.structured_outputs is not None:
        given["structured_outputs"] = structs.asdict(body.structured_outputs)
    given |= {name: {field: value} for name, field in GUIDED.items() if (value := getattr(body, name)) is not None}
    found: dict[str, Grammar] = {}
    for name, fields in given.items():
        try:
            found[name] = _grammar(**fields)
        except RecursionError:
            raise bad_request(f"{name}: the schema is too deeply nested", name) from None
        except ValueError as error:
            raise bad_request(str(error), name) from None
    if len(found) > 1:
        raise bad_request(f"{' and '.join(found)} contradict each other: give one of them", list(found)[1])
    return next(iter(found.values()), None)


def _response_schema(wanted: ResponseFormat) -> Any:
    if wanted.type == "json_object":
        return OBJECT
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise bad_request("response_format: json_schema needs a schema", "response_format.json_schema.schema")
    return wanted.json_schema.schema


def _grammar(
    json: Any = None,
    json_object: bool | None = None,
    grammar: str | None = None,
    disable_additional_properties: bool | None = None,
    **rest: Any,
) -> Grammar:
    """From the fields of structured_outputs."""
    schema = OBJECT if json is None and json_object else json
    if schema is not None and not isinstance(schema, str):
        schema = dumps(schema)
    return Grammar(json_schema=schema, lark=grammar, open_objects=disable_additional_properties is False, **rest)
