"""What a layer keeps of the tokens it has seen, and for how long. Plain numbers, without torch.

Logical page i of a request is for its tokens [i · page_size, (i + 1) · page_size). A policy says which pages exist, and
until when; the cache manager, the memory plan and the runners ask it and know no kind of layer themselves.
"""

import math
import sys
from dataclasses import dataclass
from typing import ClassVar

NEVER = sys.maxsize


class CachePolicy:
    """Which pages a request has. By default those of all its tokens, until it ends."""

    __slots__ = ()

    per_token: ClassVar[bool] = True
    """A page has an entry for each of its tokens; else it is one state."""
    slides: ClassVar[bool] = False
    """Pages are given back while the request runs."""

    def num_pages(self, begin: int, end: int) -> int:
        """How many of the logical pages [begin, end) exist; they are the first ones."""
        return end - begin

    def first_page(self, position: int, page_size: int) -> int:
        """The first page that a query at this position needs."""
        return 0

    def needed_until(self, page: int, page_size: int) -> int:
        """The first position from which on no query needs this page."""
        return NEVER

    def num_kept(self, num_tokens: int) -> int:
        """Tokens, of `num_tokens`, that the next query needs."""
        return num_tokens

    def held_pages(self, num_tokens: int, page_size: int) -> int:
        """The most pages that a request of up to `num_tokens` tokens holds between steps."""
        return -(-num_tokens // page_size)

    def peak_pages(self, num_tokens: int, max_chunk: int, page_size: int) -> int:
        """The most pages that it holds during a step, with up to `max_chunk` new tokens in each."""
        return self.held_pages(num_tokens, page_size)


@dataclass(frozen=True, slots=True)
class KeepAll(CachePolicy):
    """Every token's entry is kept until the request ends."""


@dataclass(frozen=True, slots=True)
class KeepWindow(CachePolicy):
    """A query sees the last `tokens` tokens, itself included; pages before them are given back."""

    tokens: int
    slides: ClassVar[bool] = True

    def first_page(self, position: int, page_size: int) -> int:
        """A query sees keys position − tokens + 1 .. position: with a window of 10 and pages of 4, position 17 sees
        8 .. 17 and position 18 sees 9 .. 18, both from page 2 on; position 16 sees 7 .. 16, from page 1 on."""
        return max(0, position - self.tokens + 1) // page_size

    def needed_until(self, page: int, page_size: int) -> int:
        return (page + 1) * page_size + self.tokens - 1

    def num_kept(self, num_tokens: int) -> int:
        return min(num_tokens, self.tokens)

    def held_pages(self, num_tokens: int, page_size: int) -> int:
        # A window that is not page-aligned touches one page more than its length fills.
        return min(-(-num_tokens // page_size), -(-self.tokens // page_size) + 1)

    def peak_pages(self, num_tokens: int, max_chunk: int, page_size: int) -> int:
        # While the chunk that ends at `end` is computed: its own and those in the window of its first token. After
        # `span` tokens this repeats from page to page.
        span = max_chunk + self.tokens - 1
        ends = range(max(1, num_tokens - page_size + 1), num_tokens + 1)
        return max(-(-end // page_size) - max(0, end - span) // page_size for end in ends)


@dataclass(frozen=True, slots=True)
class OneState(CachePolicy):
    """One state for the whole request, in its logical page 0. At position 0 the layer takes it for zero, whatever the
    page holds, so nothing needs clearing. The next token changes it, so that requests share copies of it."""

    per_token: ClassVar[bool] = False

    def num_pages(self, begin: int, end: int) -> int:
        return int(begin == 0 < end)

    def num_kept(self, num_tokens: int) -> int:
        return min(num_tokens, 1)

    def held_pages(self, num_tokens: int, page_size: int) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one layer keeps."""

    shapes: tuple[tuple[int, ...], ...]
    """Of its tensors, per token or per state. Keys and values: ((heads, head dim), (heads, head dim))."""
    policy: CachePolicy
    dtype: str | None = None
    """None: the model's."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with the same CacheSpec; they share a page table."""

    layers: tuple[int, ...]
    spec: CacheSpec

    @property
    def policy(self) -> CachePolicy:
        return self.spec.policy

    @property
    def num_values(self) -> int:
        """Numbers that one token, or one state, takes in all layers of the group."""
        return len(self.layers) * sum(map(math.prod, self.spec.shapes))
