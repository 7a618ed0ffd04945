import pytest

pytest.register_assert_rewrite("tests.support.runs", "tests.support.meddler")  # their checks say what they found
