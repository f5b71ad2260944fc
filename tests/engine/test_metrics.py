"""What the engine counts: tokens of a step in one go are what they would be one by one."""

import random

from anabranch.engine.metrics import Metrics


def test_tokens_in_one_go_are_tokens_one_by_one() -> None:
    rng = random.Random(0)
    together, alone = Metrics(), Metrics()
    ids = [str(i) for i in range(12)]
    for metrics in (together, alone):
        for i, id in enumerate(ids[:-2]):
            metrics.arrive(id, 1.0 + i)
    now = 20.0
    for _ in range(50):
        now += rng.choice([0.001, 0.02, 0.3])
        step = rng.sample(ids, rng.randrange(len(ids)))  # the last two are not known
        step += step[: rng.choice((0, 0, 3))]
        together.tokens(step, now)
        for id in step:
            alone.tokens([id], now)
    assert together.as_dict()["generation_tokens"] == alone.as_dict()["generation_tokens"] > 100
    assert together.time_to_first_token == alone.time_to_first_token and sum(together.time_to_first_token.counts) == 10
    assert together.inter_token_latency.counts == alone.inter_token_latency.counts
    assert abs(together.inter_token_latency.total - alone.inter_token_latency.total) < 1e-9
    latencies = together.inter_token_latency, together.time_to_first_token
    assert together.generation_tokens == sum(sum(histogram.counts) for histogram in latencies)
