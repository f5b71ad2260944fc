"""The greedy continuation of a sequence, token by token."""

from collections.abc import Container, Sequence

from anabranch.engine.single import SingleSequence


def greedy(
    sequence: SingleSequence, prompt: Sequence[int], max_new_tokens: int, stop_ids: Container[int] = ()
) -> list[int]:
    """A stop id ends it and is not part of it."""
    tokens, found = prompt, []
    for _ in range(max_new_tokens):
        token = int(sequence.forward(tokens, all_logits=False)[-1].argmax())
        if token in stop_ids:
            break
        found.append(token)
        tokens = [token]
    return found
