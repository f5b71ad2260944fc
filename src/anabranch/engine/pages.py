"""A pool of equal pages with reference counts, one for each cache group. It does not know what the pages hold."""


class PagePool:
    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, not {num_pages}: give the KV pool more memory")
        self.num_pages = num_pages
        self.counts = [0] * num_pages
        """References on each page; 0: free."""
        self._free = list(reversed(range(num_pages)))  # a stack: the page given back last is handed out first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """n free pages, each with a count of 1."""
        assert 0 <= n <= len(self._free), f"{n} pages wanted, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self.counts[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One reference more."""
        assert self.counts[page] > 0, f"page {page} is free"
        self.counts[page] += 1

    def release(self, page: int) -> None:
        """One reference less; without any the page is free again."""
        assert self.counts[page] > 0, f"page {page} is free already"
        self.counts[page] -= 1
        if not self.counts[page]:
            self._free.append(page)

    def check(self) -> None:
        assert len(self.counts) == self.num_pages
        assert min(self.counts) >= 0
        assert sorted(self._free) == [page for page, count in enumerate(self.counts) if not count]
