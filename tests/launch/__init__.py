import pytest

pytest.register_assert_rewrite("tests.launch.harness")  # before it is imported: its checks are to say what they found
