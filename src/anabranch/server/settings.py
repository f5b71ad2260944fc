"""Settings of the server: addresses, keys, limits, timeouts. The engine's settings are config.EngineConfig."""

import ipaddress
import re
from dataclasses import dataclass
from typing import get_args

from anabranch.request import Pooling

MIB = 2**20
BODY_BASE = 2 * MIB  # bytes for everything but the prompt: tools, schemas, lists of token ids
BODY_PER_TOKEN = 32  # bytes; text has 4 or 5 a token, Chinese as \u escapes 12, token ids 7
BODY_MOST = 16 * MIB  # by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    """Names of the model that requests may use; answers carry the first. Empty: the folder's name, or the hub id."""
    api_key: tuple[str, ...] = ()
    """Any of them gives access to every route; health needs none."""
    allow_no_api_key: bool = False
    """Serve other machines without a key."""
    allowed_hosts: tuple[str, ...] = ()
    """Names allowed in the Host header in addition to addresses, localhost and `host`; "*": any. Checked where there is
    no key, or where names are given: see `guard`."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of these origins may send requests and read answers (CORS); "*": of any."""
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    pooling: Pooling = "last"
    """Of embeddings, where a request has none."""
    metrics_compat: str = ""
    """"vllm": the core metrics a second time, under vLLM's names."""

    max_queue: int = 1024
    """Sequences that may wait in addition to those that run; the next gets 429."""
    max_connections: int | None = None
    """Connections open at once; the next gets 503. None: as many as open files allow, up to 8192."""
    max_body_bytes: int | None = None
    """A larger one gets 413. None: what a prompt as long as the context can need, see `body_limit`."""
    max_header_bytes: int = 32 * 1024
    header_timeout: float = 10.0
    """Seconds for a request's headers to arrive, from their first byte (or from the connection's beginning)."""
    body_timeout: float = 60.0
    prepare_timeout: float = 30.0
    """Seconds to render and tokenise."""
    stall_timeout: float = 60.0
    """Seconds after which a client that receives nothing is disconnected."""
    begin_timeout: float = 0.5
    """Seconds after which a stream begins without a token: the engine has had time to refuse the request."""
    grammar_timeout: float = 5.0
    """The same for requests with a grammar, which is compiled first."""
    ping_timeout: float = 5.0
    """Seconds of silence in a stream after which a comment or a `ping` is sent."""
    keep_alive_timeout: float = 75.0
    shutdown_timeout: float = 30.0
    """Seconds for running requests to finish after SIGTERM."""
    step_timeout: float = 300.0
    """Seconds after which an engine that is still in the same step counts as dead."""
    start_timeout: float = 1800.0
    log_format: str = "text"

    def __post_init__(self) -> None:
        least = {"max_body_bytes": 1024, "max_header_bytes": 1024, "max_connections": 1, "max_queue": 0}
        least |= {"shutdown_timeout": 0, "keep_alive_timeout": 0}
        for name, bound in least.items():
            if (value := getattr(self, name)) is not None and not value >= bound:
                unit = " seconds" if name.endswith("_timeout") else ""
                raise ValueError(f"{name} must be at least {bound}{unit}, not {value}")
        for name in self.__slots__:
            if name.endswith("_timeout") and name not in least and not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 seconds, not {getattr(self, name)}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must lie in [0, 65535], not {self.port}")
        if not all(name.strip() for name in self.served_model_name):
            raise ValueError("served_model_name must not be empty; leave it out for the name of the folder")
        if self.pooling not in get_args(Pooling):
            raise ValueError(f"pooling must be one of {', '.join(get_args(Pooling))}, not {self.pooling!r}")
        if self.metrics_compat not in ("", "vllm"):
            raise ValueError(f"metrics_compat must be vllm or nothing, not {self.metrics_compat!r}")
        if not all(key.strip() and key.isascii() for key in self.api_key):
            raise ValueError("an API key must be ASCII and not empty; is the variable it comes from set?")
        for name in self.allowed_hosts:
            if not re.fullmatch(r"\*|[\w.-]+", name):
                raise ValueError(f"allowed_hosts: {name!r} is not a host name; give names without a port, or *")
        for origin in self.allowed_origins:
            if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s*,]+", origin):
                raise ValueError(f"allowed_origins: {origin!r} is no origin; give http://localhost:3000, or *")
        if not self.api_key and not self.allow_no_api_key and not is_loopback(self.host):
            raise ValueError(
                f"refusing to serve {self.host} without a key: everyone who reaches this machine could use the model. "
                "Give --api-key (or ANABRANCH_API_KEY), or stay with --host 127.0.0.1, or give --allow-no-api-key"
            )

    def body_limit(self, max_model_len: int) -> int:
        """Bytes of the largest body that is accepted, with this many tokens of context."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return min(BODY_BASE + BODY_PER_TOKEN * max_model_len, BODY_MOST)


def parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    address = parse_address(host)
    return host == "localhost" or (address is not None and address.is_loopback)
