"""The bodies of requests in OpenAI's dialect, with vLLM's additions, as schemas, and their SamplingParams.

Schemas check types and sizes, SamplingParams checks ranges; chat and openai interpret the other fields. A field
that a schema does not know is refused, at every depth. Fields that have no effect (`ignoring`) are known because
clients send them: hints that change no answer, and those of an answer that comes back as part of the conversation.
Fields with one possible value (`only`) are known because clients send their defaults.
"""

from collections.abc import Callable, Mapping
from json import dumps
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta, Struct, defstruct, field

from anabranch.sampling_params import Grammar, SamplingParams
from anabranch.server.errors import bad_request

MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_PROMPTS = 1024
MAX_TOKENIZED = 4_000_000  # characters for /tokenize

Schema = TypeVar("Schema", bound=Struct)
JsonObject = dict[str, Any]
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
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Fields that have no effect."""
    ONLY: ClassVar[dict[str, tuple[Any, str]]] = {}
    """By field, the only value that it may have, and why it may have no other."""
    OTHER_FIELDS: ClassVar[dict[str, str]] = {}
    """Fields of other servers that are refused: what to send instead, or why there is nothing."""


def ignoring(*names: str, **types: Any) -> Callable[[type[Schema]], type[Schema]]:
    """Add fields that are accepted and have no effect: names with any value, others with null or a value of a type."""
    fields: list[Any] = [(name, Any, None) for name in names]
    fields += [(name, type | None, None) for name, type in types.items()]

    return lambda schema: _extend(schema, fields, IGNORED=getattr(schema, "IGNORED", frozenset()) | {*names, *types})


def only(**fields: tuple[Any, str]) -> Callable[[type[Schema]], type[Schema]]:
    """Add fields that have one possible value: the value, and why they may have no other."""
    added = [(name, Any, None) for name in fields]
    return lambda schema: _extend(schema, added, ONLY=getattr(schema, "ONLY", {}) | fields)


def _extend(schema: type[Schema], fields: list[Any], **about: Any) -> type[Schema]:
    about |= {"__doc__": schema.__doc__}
    made: Any = defstruct(schema.__name__, fields, bases=(schema,), namespace=about, module=schema.__module__)
    return made  # type: ignore[no-any-return]


class Body(StrictObject, kw_only=True):
    model: Name | None = None


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


VLLM: dict[str, Any] = {
    "spaces_between_special_tokens": bool,
    "guided_decoding_backend": Name,
    "guided_whitespace_pattern": str,
}
VLLM |= {"length_penalty": float, "kv_transfer_params": JsonObject, "mm_processor_kwargs": JsonObject}
VLLM |= {"media_io_kwargs": JsonObject}
SGLANG: dict[str, Any] = {"return_cached_tokens_details": bool, "custom_labels": JsonObject, "routed_dp_rank": int}
SGLANG |= {"data_parallel_rank": int, "images_config": JsonObject, "rid": Name | list[Name]}
SGLANG |= {"custom_params": JsonObject, "early_stopping": bool | Name, "use_audio_in_video": bool}
WHOLE_PROMPTS = (-1, "prompts are never truncated; shorten it before it is sent")


@ignoring(user=Name, request_id=Name, **VLLM, **SGLANG)
@only(
    use_beam_search=(False, "beams are not searched; sample several answers with n"),
    truncate_prompt_tokens=WHOLE_PROMPTS,
    return_tokens_as_token_ids=(False, "give return_token_ids for the tokens' ids"),
    return_prompt_token_ids=(False, "give return_token_ids for the ids of prompt and answer"),
    no_stop_trim=(False, "give include_stop_str_in_output to keep stop strings"),
    return_hidden_states=(False, "hidden states are not returned"),
)
class Sampling(Body, kw_only=True):
    """The fields that chats and completions share."""

    OTHER_FIELDS = {
        "regex": 'give structured_outputs: {"regex": ...}',
        "ebnf": 'give structured_outputs: {"grammar": ...}, in the form of Lark',
        "json_schema": 'give response_format: {"type": "json_schema", "json_schema": {"schema": ...}}',
        "custom_logit_processor": "programs in requests are not run",
    }
    stream: bool = False
    stream_options: StreamOptions | None = None

    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    best_of: int | None = None
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

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


SAME_NAME = set(Sampling.__struct_fields__) & set(SamplingParams.__slots__) - {"max_tokens", "logit_bias"}
"""Fields that are also fields of SamplingParams, with the same meaning."""


class ToolFunction(StrictObject, kw_only=True, omit_defaults=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    returns: dict[str, Any] | None = field(name="return", default=None)
    """From transformers' description of functions; templates may write it."""
    strict: bool | None = None


@ignoring("cache_control")
class Tool(StrictObject, kw_only=True):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(StrictObject, kw_only=True):
    name: Name


class NamedTool(StrictObject, kw_only=True):
    type: Literal["function"]
    function: NamedFunction


@ignoring("parsed_arguments", "provider_specific_fields")
class FunctionCall(StrictObject, kw_only=True):
    name: Name
    arguments: str | dict[str, Any] | None = None


@ignoring("cache_control", "extra_content", "provider_specific_fields", index=int)
class ToolCall(StrictObject, kw_only=True):
    function: FunctionCall
    id: Name | None = None
    type: Literal["function"] = "function"


@ignoring("id", "index", "annotations", "citations", "cache_control", "prompt_cache_breakpoint", "extras")
class ContentPart(StrictObject, kw_only=True):
    """A part of a message's content. Only text can be read."""

    TYPES = ("text", "refusal")
    OTHER_TYPES = "cannot be read: this model takes text only"

    type: Name
    text: str | None = None
    refusal: str | None = None


@ignoring("id", "annotations", "parsed", "cache_control", "provider_specific_fields", "extra_content")
@ignoring("reasoning_details", "reasoning_items", "thinking_blocks")
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


MessageList = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
ToolList = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoiceField = Literal["none", "auto", "required"] | NamedTool
TemplateOptions = Annotated[dict[Annotated[str, Meta(max_length=64)], Any], Meta(max_length=64)]
THINKING = 'give chat_template_kwargs, in most templates {"enable_thinking": false}, or reasoning_effort'


@ignoring(metadata=JsonObject, prompt_cache_options=JsonObject, prediction=JsonObject, store=bool)
@ignoring(service_tier=Name, prompt_cache_key=Name, prompt_cache_retention=Name, safety_identifier=Name)
@ignoring(verbosity=Name, modalities=list[Literal["text"]], moderation=JsonObject)
@only(
    echo=(False, "an answer does not repeat the message before it; add it to the answer yourself"),
    add_special_tokens=(False, "the chat template writes the special tokens"),
    separate_reasoning=(True, "thoughts are always separated; the server's --reasoning-parser none stops it"),
    stream_reasoning=(True, "thoughts are streamed as they come"),
)
class ChatCompletion(Sampling, kw_only=True):
    OTHER_FIELDS = Sampling.OTHER_FIELDS | {
        "web_search_options": "this server does not search the web; give a tool of your own in tools",
        "functions": "this older form of tools is not read; give tools",
        "function_call": "this older form of tool_choice is not read; give tool_choice",
        "audio": "this model answers in text",
        **dict.fromkeys(("thinking", "enable_thinking", "reasoning"), THINKING),
    }
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
    add_generation_prompt: bool | None = None
    """By default True, unless the last message is continued."""
    continue_final_message: bool = False


@only(suffix=("", "text between a prompt and a suffix cannot be filled in: prompts are continued at their end"))
class Completion(Sampling, kw_only=True):
    prompt: str | list[Any]
    """Text, token ids, or a list of either."""
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True


@ignoring(user=Name, request_id=Name)
@only(truncate_prompt_tokens=WHOLE_PROMPTS)
class Embedding(Body, kw_only=True):
    input: str | list[Any]
    """Text, token ids, or a list of either."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = None
    """By default the server's."""
    add_special_tokens: bool = True
    priority: Priority = 0


class Tokenize(Body, kw_only=True):
    prompt: Annotated[str, Meta(max_length=MAX_TOKENIZED)] | None = None
    messages: MessageList | None = None
    tools: ToolList | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateOptions | None = None
    chat_template: Any = None
    return_token_strs: bool = False


class Detokenize(Body, kw_only=True):
    tokens: ManyTokenIds
    skip_special_tokens: bool = False


def sampling_params(body: Sampling, defaults: Mapping[str, Any] = MappingProxyType({}), **fixed: Any) -> SamplingParams:
    """`defaults` are the model's, for fields that the request leaves out. `fixed` are the dialect's: logprobs, and
    max_tokens where the request has none. A request may ask for more tokens than the context has room for: the engine
    ends the answer there, with finish_reason "length"."""
    given: dict[str, Any] = {**defaults, "grammar": grammar(body)}
    for same in SAME_NAME:
        if (value := getattr(body, same)) is not None:
            given[same] = tuple(value) if isinstance(value, list) else value
    if isinstance(body.stop, str):
        given["stop"] = (body.stop,)
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
    given: dict[str, StructuredOutputs] = {}
    if body.response_format is not None and body.response_format.type != "text":
        given["response_format"] = StructuredOutputs(json=_response_schema(body.response_format))
    if body.structured_outputs is not None:
        given["structured_outputs"] = body.structured_outputs
    for name, same in GUIDED.items():
        if (value := getattr(body, name)) is not None:
            given[name] = StructuredOutputs(**{same: value})
    found: dict[str, Grammar] = {}
    for name, outputs in given.items():
        try:
            found[name] = _grammar(outputs)
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


def _grammar(outputs: StructuredOutputs) -> Grammar:
    schema = OBJECT if outputs.json is None and outputs.json_object else outputs.json
    return Grammar(
        json_schema=schema if schema is None or isinstance(schema, str) else dumps(schema),
        regex=outputs.regex,
        choice=outputs.choice,  # type: ignore[arg-type]
        lark=outputs.grammar,
        open_objects=outputs.disable_additional_properties is False,
    )
