"""Student's t against scipy's, which the tests of sklearn bring along."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.leaks.students_t import quantile, upper_tail

pytestmark = pytest.mark.needs("sklearn")


@pytest.mark.slow
@given(st.floats(-50, 50), st.integers(1, 300))
def test_the_chance_above_t_is_scipys(t, freedom):
    from scipy import stats

    assert upper_tail(t, freedom) == pytest.approx(stats.t.sf(t, freedom), abs=1e-12)


@pytest.mark.slow
@given(st.integers(1, 300), st.floats(1e-6, 0.49))
def test_the_quantile_is_scipys(freedom, alpha):
    from scipy import stats

    expected = stats.t.isf(alpha, freedom)
    assert quantile(freedom, alpha) == pytest.approx(expected, rel=1e-9)


def test_fewer_than_one_degree_of_freedom_count_as_one():
    assert quantile(0, 0.01) == quantile(-3, 0.01) == quantile(1, 0.01)
