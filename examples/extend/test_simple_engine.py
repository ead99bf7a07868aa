import torch
from simple_engine import SimpleEngine

from luffy.api import Request, load_config
from luffy.models.load import load_model
from luffy.rollout.native import NativeEngine
from luffy.types import Sampling


def test_same_tokens_as_the_native_engine():
    model = load_model(load_config("tiny/luffy").model.path)
    requests = [Request((1, 2, 3), seed, Sampling(max_tokens=8, eos_ids=(4,))) for seed in range(4)]
    for ours, native in zip(
        SimpleEngine(model).generate(requests), NativeEngine(model).generate(requests), strict=True
    ):
        assert ours.token_ids.tolist() == native.token_ids.tolist() and ours.finish == native.finish
        assert torch.allclose(ours.log_probs, native.log_probs.cpu(), atol=1e-4)
