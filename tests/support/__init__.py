import pytest

pytest.register_assert_rewrite("tests.support.runs", "tests.support.meddler")  # so that their failures show values
