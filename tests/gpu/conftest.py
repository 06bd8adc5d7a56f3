"""Asserts of the contract are shown in full wherever its tests are run."""

import pytest

pytest.register_assert_rewrite("tests.gpu.contract")
