"""`anabranch bench host` measures what it promises."""

from anabranch.bench import host


def test_host_measures_every_request_in_every_step() -> None:
    assert 0 < host.measure(3, 5) < 1e6


def test_churn_keeps_as_many_running_and_lets_them_come_and_go() -> None:
    took, joining = host.measure_churn(12, 40)
    assert 0 < took < 1e6
    mean = sum(host.OUTPUT) / 2
    assert 12 / mean / 2 < joining < 12 / mean * 2
