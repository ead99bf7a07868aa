import pytest

from luffy.rewards import build_verifier


@pytest.fixture(scope="session")
def math_verifier():
    """One for all, because a worker of the math reward imports SymPy for seconds."""
    pytest.importorskip("math_verify", reason="the math reward needs Math-Verify")
    with build_verifier("math", workers=2, timeout_s=8.0) as verifier:
        yield verifier
