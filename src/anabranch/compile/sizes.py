"""The sizes that steps are padded to: few enough to be captured, close enough that padding costs little."""


def decode_sizes(largest: int) -> list[int]:
    """Ascending, up to `largest`, which is one of them. Gaps grow with size: from 64 on, padding is under an eighth."""
    sizes = [1, 2, 4]
    step = 8
    while sizes[-1] < largest:
        if sizes[-1] >= 16 * step:
            step *= 2
        sizes.append((sizes[-1] // step + 1) * step)
    return [size for size in sizes if size < largest] + [largest]


def prefill_sizes(largest: int) -> list[int]:
    """Ascending, up to `largest`, which is one of them; four to a doubling, since a few more rows cost almost nothing
    while a step is bound by reading weights."""
    sizes = [16, 32, 48, 64]
    while sizes[-1] < largest:
        sizes += [sizes[-1] * quarter // 4 for quarter in (5, 6, 7, 8)]
    return [size for size in sizes if size < largest] + [largest]


def prompt_sizes(padded: int, largest: int) -> list[int]:
    """The prefill sizes up to `padded`; then doublings and `largest`, which are often filled, since long prompts are
    split there."""
    sizes = prefill_sizes(min(padded, largest))
    while 2 * sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return sizes if sizes[-1] == largest else [*sizes, largest]


def common_decode(sizes: list[int]) -> list[int]:
    """The sizes captured before the first request: powers of two and, where the time grows with the rows, the sizes
    half way between them. Round numbers are common in requests."""
    return _round(sizes, halves_from=128)


def common_prefill(sizes: list[int]) -> list[int]:
    """The same; here the time is dominated by reading weights up to a larger size."""
    return _round(sizes, halves_from=512)


def _round(sizes: list[int], halves_from: int) -> list[int]:
    """Largest first, so that the smaller ones fit into memory that the first has taken."""
    powers = {1 << log for log in range(sizes[-1].bit_length())}
    halves = {3 * power // 2 for power in powers if power >= halves_from}
    return sorted({*sizes} & (powers | halves | {sizes[-1]}), reverse=True)


def fitting(sizes: list[int], num_rows: int) -> int | None:
    """The smallest size of at least `num_rows`."""
    return next((size for size in sizes if size >= num_rows), None)
