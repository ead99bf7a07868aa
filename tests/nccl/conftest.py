"""Several ranks on one GPU, over real NCCL (`make test-nccl`)."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "/nccl/" in str(item.path):
            item.add_marker(pytest.mark.nccl)
