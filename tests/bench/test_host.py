"""`anabranch bench host` measures what it promises."""

from anabranch.bench import host


def test_host_measures_every_request_in_every_step() -> None:
    assert 0 < host.measure(3, 5) < 1e6
