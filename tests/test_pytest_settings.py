"""What pytest is told in pyproject.toml."""


def test_a_test_that_takes_too_long_says_where_it_is_also_in_a_worker_before_it_ends_it(pytestconfig):
    """A worker that pytest-timeout ends says nothing but that it has crashed."""
    begins, ends = (float(pytestconfig.getini(name)) for name in ("faulthandler_timeout", "timeout"))
    assert 0 < begins < ends
